"""Slurm's short forms."""

import pytest

from stagerun.system.nodelist import expand, per_node


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
