"""Whether an output folder is one host's alone."""

from pathlib import Path

import pytest

from stagerun.store import local_kind, lost_with
from stagerun.system.files import LOCAL, mounted
from stagerun.tools.plan.command import place_remark
from stagerun.tools.status.command import hosts_text

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
def test_the_kind_of_file_system(path: str, kind: str) -> None:
    assert local_kind(Path(path), MOUNTS) == kind
    found, source = mounted(Path(path), MOUNTS)
    assert source and (found == kind if kind else found not in LOCAL)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/lustre/out")
    assert local_kind(tmp_path, MOUNTS) == "ext4" and local_kind(tmp_path / "link", MOUNTS) == ""
    assert local_kind(Path("/dev/shm")) in ("tmpfs", "")


def test_a_plan_for_several_hosts_says_what_a_path_of_one_means() -> None:
    shm = Path("/dev/shm/out")
    text = lost_with(shm, "tmpfs", "")
    assert "(tmpfs) of its first host alone: if that host is lost, the run can't go on" in text
    assert place_remark(shm, {"SLURM_JOB_NUM_NODES": "2"}) == [text]
    assert place_remark(shm, {}) == [] == place_remark(shm, {"SLURM_JOB_NUM_NODES": "1"})
    assert place_remark(Path("/proc/out"), {"SLURM_JOB_NUM_NODES": "2"}) == []


def test_where_the_ranks_are() -> None:
    assert hosts_text(["a", "a", "a", "b", "c", "c"]) == "on 3 hosts: a (ranks 0 to 2), b (rank 3), c (ranks 4, 5)"
    assert hosts_text([f"n{n}" for n in range(10)]).endswith("n7 (rank 7) and 2 more")
    assert hosts_text(["a", "b", "a", "b"]) == "on 2 hosts: a (ranks 0, 2), b (ranks 1, 3)"
