"""Whether an output folder is one host's alone."""

from pathlib import Path

import contract
import pytest
import tiny

from stagerun.store import local_kind, lost_with

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/a/scratch rw shared:7 master:2 - xfs /dev/sdb rw
32 22 0:42 / /lustre rw - lustre mgs@tcp:/work rw
33 22 0:43 / /with\040space rw - tmpfs tmpfs rw
34 22 0:44 / /mnt/ssh rw - fuse.sshfs node4:/src rw
35 22 0:45 / /twice rw - ext4 /dev/sdc rw
36 35 0:46 / /twice rw - beegfs beegfs_nodev rw
damaged
"""


@pytest.mark.parametrize(
    "path, kind",
    [
        ("/out", "ext4"),
        ("/home/a/out", ""),
        ("/home/a/scratch/out", "xfs"),
        ("/home/a/scratchy", ""),
        ("/lustre/out/not/yet", ""),
        ("/with space/out", "tmpfs"),
        ("/mnt/ssh/out", ""),
        ("/twice/out", ""),
    ],
)
def test_the_kind_of_file_system(path, kind):
    assert local_kind(Path(path), MOUNTS) == kind


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("/lustre/out")
    assert local_kind(tmp_path, MOUNTS) == "ext4" and local_kind(tmp_path / "link", MOUNTS) == ""
    assert local_kind(Path("/dev/shm")) in ("tmpfs", "")


def test_a_plan_for_several_hosts_says_what_a_path_of_one_means(tmp_path, monkeypatch):
    schedule = tiny.make_schedule(tmp_path / "s", tmp_path)
    text = lost_with(Path("/dev/shm/out"), "tmpfs", "")
    assert "(tmpfs) of its first host alone: if that host is lost, the run can't go on" in text
    for nodes, out, said in (("2", "/dev/shm/out", True), ("1", "/dev/shm/out", False), ("2", "/proc/out", False)):
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
        plan = contract.stagerun(["plan", schedule, "--out", out], tmp_path).output
        assert (text in plan) is said, plan
