"""On which hosts, and how many workers on each."""

from pathlib import Path

import pytest

from stagerun.base.errors import RecipeError, UsageError
from stagerun.launch.hostfile import Host, read_hosts


def read(folder: Path, text: str) -> tuple[Host, ...]:
    """Of a file."""
    file = folder / "hosts"
    file.write_text(text)
    return read_hosts(str(file))


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
    assert [(host.name, host.slots) for host in read(tmp_path, text)] == expected


def test_a_list() -> None:
    assert [(host.name, host.slots) for host in read_hosts("a,b:2, c")] == [("a", None), ("b", 2), ("c", None)]


@pytest.mark.parametrize("text, columns", [("a,,b", [3]), ("a, b,", [6]), (",a", [1]), ("a, ,b,", [4, 7])])
def test_a_list_with_a_name_left_out(text: str, columns: list[int]) -> None:
    with pytest.raises(RecipeError) as told:
        read_hosts(text)
    assert [(p.message, p.span and p.span.column) for p in told.value.problems] == [
        ("a host's name is missing", column) for column in columns
    ]


MISTAKES = """a
b:x
c slot=2
a
-oProxyCommand=x
fe80::1
f slots=
g:2222
"""


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as told:
        read(tmp_path, MISTAKES)
    text = told.value.render()
    for line, column, said in (
        (2, 1, "`b:x` is no host"),
        (3, 3, "`slot=2` is not understood\n  c slot=2\n    ^^^^^^\n  hint: write `host`, `host:2` or `host slots=2`"),
        (4, 1, "`a` stands in line 1\n  a\n  ^\n  hint: for two workers on it write `a:2` there"),
        (5, 1, "`-oProxyCommand=x` is no host"),
        (6, 1, "`fe80::1` is no host"),
        (7, 3, "`slots=` is not understood"),
        (8, 1, "`g:2222` is no host"),
    ):
        assert f"hosts:{line}:{column}: {said}" in text
    assert text.endswith("7 mistakes")


@pytest.mark.parametrize("name", ["-x", "-x@a", "a;b", "a/b", "$(x)", "`x`", "a b=c", ""])
def test_no_name_is_an_option_or_a_command(tmp_path: Path, name: str) -> None:
    with pytest.raises((RecipeError, UsageError)):
        read(tmp_path, f"{name}\n")


def test_what_is_no_file(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# nobody\n")
    binary.write_bytes(b"\xff\xfe\0")
    for given, word in (
        (str(tmp_path), "is a folder"),
        (str(tmp_path / "none"), "no such file"),
        (str(empty), "names no host"),
        (str(binary), "not a text file"),
        (" ,", "names no host"),
    ):
        with pytest.raises(UsageError, match=word):
            read_hosts(given)
