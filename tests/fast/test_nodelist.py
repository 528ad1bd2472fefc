"""Hosts of a file, a list and Slurm's short forms, and `run --bind numa`: the cores that a machine has, and who gets which. What is no
host: tests/cases/hosts.txt."""

from pathlib import Path

import pytest
from facade import UsageError

from stagerun.launch.hostfile import read_hosts
from stagerun.system.nodelist import expand, per_node
from stagerun.system.numa import nodes, shares


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\nb\n", [("a", None), ("b", None)]),
        # Open MPI's and DeepSpeed's form, hydra's, and what people write around it.
        ("# two racks\n\na slots=2   # the fast one\n\tb max_slots=4 slots=3\n", [("a", 2), ("b", 3)]),
        ("a max-slots=4", [("a", None)]),
        ("a:2\nb:1\r\n", [("a", 2), ("b", 1)]),
        ("me@node-1.rack_2.org:8", [("me@node-1.rack_2.org", 8)]),
        ("10.0.0.1\n[fe80::1]:2\n", [("10.0.0.1", None), ("[fe80::1]", 2)]),
    ],
)
def test_forms(tmp_path: Path, text: str, expected: list[tuple[str, int | None]]) -> None:
    (tmp_path / "hosts").write_text(text)
    assert [(host.name, host.slots) for host in read_hosts(str(tmp_path / "hosts"))] == expected


def test_a_list() -> None:
    assert [(host.name, host.slots) for host in read_hosts("a,b:2, c")] == [("a", None), ("b", 2), ("c", None)]


def test_a_file_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UsageError, match="not a text file"):
        read_hosts(str(tmp_path / "binary"))


# -- Slurm's short forms


@pytest.mark.parametrize(
    "text, names",
    [
        ("node1", ["node1"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a1b[01-03]c", ["a1b01c", "a1b02c", "a1b03c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("gpu2,node[3,5-6],login.example.org", ["gpu2", "node3", "node5", "node6", "login.example.org"]),
        ("n[9-10]", ["n9", "n10"]),
    ],
)
def test_names(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[1-", "n[1", "n]1[", "n[2-1]", "n[a-b]", "n[]", "n[1-99999999999]", "n[[1]]"]
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="`"):
        expand(text)


def test_tasks_per_node() -> None:
    assert per_node("2(x3),1") == [2, 2, 2, 1]
    assert per_node("4") == [4]
    for text in ("", "2(x", "x", "2(x999999999)"):
        with pytest.raises(ValueError, match="`"):
            per_node(text)


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
