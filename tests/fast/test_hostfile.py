"""On which hosts, and how many workers on each."""

from pathlib import Path

import pytest

from stagerun.base.errors import RecipeError, UsageError
from stagerun.launch.hostfile import Host, parse_file, parse_list, read_hosts, workers


def brief(hosts: tuple[Host, ...]) -> list[tuple[str, int | None, int | None]]:
    return [(host.name, host.slots, host.most) for host in hosts]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\nb\n", [("a", None, None), ("b", None, None)]),
        # Open MPI's and DeepSpeed's form, hydra's, and what people write around it.
        ("# two racks\n\na slots=2   # the fast one\n\tb max_slots=4 slots=3\n", [("a", 2, None), ("b", 3, 4)]),
        ("a max-slots=4", [("a", None, 4)]),
        ("a:2\nb:1\r\n", [("a", 2, None), ("b", 1, None)]),
        ("me@node-1.rack_2.org:8", [("me@node-1.rack_2.org", 8, None)]),
        ("10.0.0.1\n[fe80::1]:2\n", [("10.0.0.1", None, None), ("[fe80::1]", 2, None)]),
    ],
)
def test_forms(text: str, expected: list[tuple[str, int | None, int | None]]) -> None:
    assert brief(parse_file(text, "hosts")) == expected


def test_a_list() -> None:
    assert brief(parse_list("a,b:2, c")) == [("a", None, None), ("b", 2, None), ("c", None, None)]


@pytest.mark.parametrize("text, columns", [("a,,b", [3]), ("a, b,", [6]), (",a", [1]), ("a, ,b,", [4, 7])])
def test_a_list_with_a_name_left_out(text: str, columns: list[int]) -> None:
    with pytest.raises(RecipeError) as told:
        parse_list(text)
    problems = told.value.problems
    assert [(p.message, p.span and p.span.column) for p in problems] == [
        ("a host's name is missing", c) for c in columns
    ]


MISTAKES = """a
b:x
c slot=2
a
d slots=5 max_slots=4
-oProxyCommand=x
fe80::1
e slots=2 slots=3
f slots=
g:2222
"""

TOLD = """hosts:2:3: `x` is not a number of workers: 1 to 9999
  b:x
    ^

hosts:3:3: `slot=2` is not understood
  c slot=2
    ^^^^^^
  hint: did you mean `slots`?

hosts:4:1: `a` stands in line 1
  a
  ^
  hint: for two workers on it write `a:2` there

hosts:5:1: slots=5 is more than max_slots=4
  d slots=5 max_slots=4
  ^^^^^^^^^^^^^^^^^^^^^

hosts:6:1: `-oProxyCommand=x` is not the name of a host
  -oProxyCommand=x
  ^^^^^^^^^^^^^^^^

hosts:7:1: `fe80::1` is not the name of a host
  fe80::1
  ^^^^^^^
  hint: write an IPv6 address in brackets: `[fe80::1]`

hosts:8:11: `slots` is given twice for this host
  e slots=2 slots=3
            ^^^^^^^

hosts:9:9: a number of slots is missing
  f slots=
          ^

hosts:10:1: `g:2222`: after the colon stands how many workers that host has, and 2222 may be meant for a port
  g:2222
  ^^^^^^
  hint: a port goes into ~/.ssh/config or `--ssh "ssh -p 2222"`; so many workers are `g slots=2222`

9 mistakes"""


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(RecipeError) as told:
        parse_file(MISTAKES, "hosts")
    assert told.value.render() == TOLD


@pytest.mark.parametrize("name", ["-x", "-x@a", "a;b", "a/b", "$(x)", "`x`", "a b=c", ""])
def test_no_name_is_an_option_or_a_command(name: str) -> None:
    with pytest.raises((RecipeError, UsageError)):
        parse_file(f"{name}\n", "hosts")


def test_what_is_no_file(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# nobody\n")
    binary.write_bytes(b"\xff\xfe\0")
    for given, word in (
        (tmp_path, "is a folder"),
        (tmp_path / "none", "no such file"),
        (empty, "no host"),
        (binary, "not a text file"),
    ):
        with pytest.raises(UsageError, match=word):
            read_hosts(str(given))
    (tmp_path / "hosts").write_text("a slots=2\n")
    assert brief(read_hosts(str(tmp_path / "hosts"))) == [("a", 2, None)]
    assert brief(read_hosts("a,b")) == [("a", None, None), ("b", None, None)]


def test_how_many_workers() -> None:
    hosts = parse_file("a slots=3\nb\nc max_slots=2\n", "hosts")
    usual = {"a": 1, "b": 8, "c": 2}
    assert workers(hosts, None, usual) == {"a": 3, "b": 8, "c": 2}
    assert workers(hosts, None, {**usual, "c": 4}) == {"a": 3, "b": 8, "c": 2}, "as many as it may have"
    assert workers(hosts, 2, usual) == {"a": 2, "b": 2, "c": 2}
    with pytest.raises(RecipeError) as told:
        workers(hosts, 3, usual)
    assert told.value.render().startswith(
        "hosts:3:1: 3 workers are more than the 2 that `c` may have\n  c max_slots=2\n  ^"
    )
