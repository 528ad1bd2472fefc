"""`run --bind numa`: which cores a machine has, and which worker gets which."""

from pathlib import Path

import pytest

from stagerun.base.errors import UsageError
from stagerun.system.numa import nodes, shares


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


def test_workers_are_dealt_out_to_nodes_in_whole_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], ["0,4", "1,5", "2,6", "3,7"])
    found = nodes(frozenset(range(8)), root)
    assert found == {0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}
    assert shares(found, 1) == [(0, [0, 1, 4, 5])]
    assert shares(found, 4) == [(0, [0, 4]), (0, [1, 5]), (1, [2, 6]), (1, [3, 7])]
    assert nodes(frozenset({0, 2, 6}), root) == {0: [(0,)], 1: [(2, 6)]}, "those that are allowed alone"


def test_a_worker_without_a_core_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="2 workers for the 1 core"):
        shares(nodes(frozenset({3}), tmp_path), 2)
