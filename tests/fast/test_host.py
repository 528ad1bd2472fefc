"""What the machine has: free memory (its own, and of every control group above a process, in both versions), and for `run --bind numa` the
cores, and who gets which."""

from pathlib import Path

import pytest
from facade import UsageError

from stagerun.system.host import available_memory, nodes, shares, whole_memory

MACHINE = 1 << 28  # it has more; what the groups here allow is less


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def group(root: Path, lines: str) -> None:
    (root / "proc/self/cgroup").write_text(lines)


def v2(root: Path, name: str, most: str, used: int, inactive: int = 0) -> None:
    """Of control groups of version 2; `v1` are the other ones."""
    folder = root / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 7\ninactive_file {inactive}\n")


def v1(root: Path, name: str, most: int, used: int, inactive: int = 0) -> None:
    folder = root / "sys/fs/cgroup/memory" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{most}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 9\ntotal_inactive_file {inactive}\n")


def test_without_control_groups_it_is_the_machines(root):
    assert available_memory(root) > MACHINE
    group(root, "0::/gone\n3:cpu:/\n")
    assert available_memory(root) > MACHINE


def test_the_tightest_of_all_groups_above(root):
    """Slurm limits the job; the step below it, in which the process is, says `max`."""
    group(root, "0::/slurm/job_7/step_0\n")
    v2(root, "slurm/job_7/step_0", "max", 10)
    assert available_memory(root) > MACHINE
    v2(root, "slurm/job_7", "3000000", 2900000, inactive=1900000)  # pages that the kernel gives back are free
    assert available_memory(root) == 2000000
    v2(root, "slurm", "4000000", 2500000)
    assert available_memory(root) == 1500000
    v2(root, "", "1600000", 1700000)  # in a container the mount itself is a group
    assert available_memory(root) == 0


def test_what_may_be_had_in_all_is_the_least_limit(root):
    """Slurm's limit is on the job's group, below the root and above the step's."""
    group(root, "0::/slurm/job_7/step_0\n")
    machine = whole_memory(root)
    assert machine > 1 << 28
    v2(root, "slurm/job_7/step_0", "max", 10)
    v2(root, "slurm/job_7", "3000000", 1000000)
    assert whole_memory(root) == 3000000
    group(root, "3:memory:/slurm\n")
    assert whole_memory(root) == machine
    v1(root, "slurm", 2000000, 0)
    assert whole_memory(root) == 2000000


def test_version_1_where_memory_is_mounted_by_itself(root):
    group(root, "9:cpu,cpuacct:/a\n4:memory:/slurm/job_7\n0::/\n")
    v1(root, "slurm/job_7", 9223372036854771712, 5000)  # none
    assert available_memory(root) > MACHINE
    v1(root, "slurm", 3000000, 2500000, inactive=500000)
    assert available_memory(root) == 1000000


@pytest.mark.parametrize("path", ["/docker/0123", "/../../.."])
def test_a_path_of_the_host_in_a_container(root, path):
    group(root, f"4:memory:{path}\n")
    v1(root, "", 3000000, 1000000)
    assert available_memory(root) == 2000000


# -- cores


def machine(root: Path, cpulists: list[str], cores: list[str]) -> Path:
    """Nodes with these CPUs; `cores` lists the hardware threads of each core."""
    system = root / "sys/devices/system"
    (system / "node").mkdir(parents=True)
    (system / "node/online").write_text(f"0-{len(cpulists) - 1}\n")
    for node, cpus in enumerate(cpulists):
        (system / f"node/node{node}").mkdir()
        (system / f"node/node{node}/cpulist").write_text(f"{cpus}\n")
    for siblings in cores:
        for cpu in siblings.split(","):
            (system / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            (system / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    return root


def test_workers_are_dealt_out_to_nodes_in_whole_cores(tmp_path):
    root = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], ["0,4", "1,5", "2,6", "3,7"])
    found = nodes(frozenset(range(8)), root)
    assert found == {0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}
    assert shares(found, 1) == [(0, [0, 1, 4, 5])]
    assert shares(found, 4) == [(0, [0, 4]), (0, [1, 5]), (1, [2, 6]), (1, [3, 7])]
    assert nodes(frozenset({0, 2, 6}), root) == {0: [(0,)], 1: [(2, 6)]}, "those that are allowed alone"


def test_a_worker_without_a_core_is_refused(tmp_path):
    with pytest.raises(UsageError, match="2 workers for the 1 core"):
        shares(nodes(frozenset({3}), tmp_path), 2)
