"""On which hosts, and how many workers on each: files as Open MPI, hydra and DeepSpeed read them, or a list. Pure, but for
`read_hosts`."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import Problem, RecipeError, Span, UsageError, nearest

_NAME = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+(?:%\w+)?\])"
)
_WORD = re.compile(r"\S+")
_SLOTS, _MOST = ("slots",), ("max_slots", "max-slots")
_MOST_BRIEF = 999  # workers after a colon


@dataclass(frozen=True, slots=True)
class Host:
    """A line. `name`: as ssh takes it, `user@` included. `slots`: workers that it is to have; None: the line doesn't say. `most`: and no
    more than that."""

    name: str
    slots: int | None = None
    most: int | None = None
    span: Span | None = None
    source: str = ""

    @property
    def address(self) -> str:
        """As other hosts know it."""
        return self.name.rpartition("@")[2].strip("[]")


def read_hosts(given: str) -> tuple[Host, ...]:
    """What `--hosts` was given: a file, or names with commas between them. RecipeError with all mistakes, UsageError."""
    path = Path(given)
    if path.is_dir():
        raise UsageError(
            f"--hosts {given} is a folder", "name a file with a host on each line, or write `--hosts a,b,c`"
        )
    if path.is_file():
        try:
            return parse_file(path.read_text(), given)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise UsageError(f"--hosts {given} can't be read: {why}") from None
    if "/" in given:
        raise UsageError(f"--hosts {given}: no such file", "name a file with a host on each line")
    return parse_list(given)


def parse_file(text: str, path: str) -> tuple[Host, ...]:
    """`host`, `host:2`, `host slots=2 max_slots=4`; `#` begins a comment. RecipeError."""
    lines = [
        (list(_WORD.finditer(line.partition("#")[0])), line, number) for number, line in enumerate(text.splitlines(), 1)
    ]
    reader = _Reader(path)
    hosts = [
        reader.host([(m.group(), m.start() + 1) for m in words], line, number) for words, line, number in lines if words
    ]
    if not hosts:
        raise UsageError(
            f"{path} names no host", "write a name on each line, with `slots=2` after it for two workers there"
        )
    return reader.all(hosts)


def parse_list(text: str) -> tuple[Host, ...]:
    """`a,b:2,c`. RecipeError."""
    reader = _Reader("--hosts")
    if not text.strip(" ,"):
        raise UsageError("--hosts names no host", "write `--hosts a,b,c`, or name a file")
    hosts = []
    for m in re.finditer(r"(?:^|(?<=,))\s*([^,]*?)\s*(?=,|$)", text):
        if m[1]:
            hosts.append(reader.host([(m[1], m.start(1) + 1)], text, 1))
        else:
            reader.missing(text, m.start(1) + 1)
    return reader.all(hosts)


class _Reader:
    """Gathers the mistakes of one file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.problems: list[Problem] = []

    def host(self, words: Sequence[tuple[str, int]], line: str, number: int) -> Host:
        """`words` with the columns where they begin."""
        (word, column), *fields = words
        name, slots = word, None
        head, colon, tail = word.rpartition(":")
        if colon and (":" not in head or head.endswith("]")):
            name = head
            slots = self._number(tail, "workers", line, number, column + len(head) + 1)
            if slots is not None and slots > _MOST_BRIEF:
                self._add(
                    f"`{word}`: after the colon stands how many workers that host has, and {slots} may be meant for a port",
                    line, number, column, len(word),
                    f'a port goes into ~/.ssh/config or `--ssh "ssh -p {slots}"`; so many workers are `{head} slots={slots}`',
                )  # fmt: skip
        if not _NAME.fullmatch(name):
            hint = "write an IPv6 address in brackets: `[fe80::1]`" if name.count(":") > 1 else ""
            self._add(f"`{name}` is not the name of a host", line, number, column, len(name) or 1, hint)
        given: dict[str, int | None] = {} if slots is None else {"slots": slots}
        for field, at in fields:
            self._field(field, at, given, line, number)
        count, most = given.get("slots"), given.get("most")
        if count is not None and most is not None and count > most:
            self._add(
                f"slots={count} is more than max_slots={most}", line, number, column, len(line.rstrip()) - column + 1
            )
        return Host(name, count, most, Span(self.path, number, column, len(word)), line)

    def missing(self, line: str, column: int) -> None:
        self._add("a host's name is missing", line, 1, column, 1, "write it there, or take the comma out")

    def _field(self, field: str, at: int, given: dict[str, int | None], line: str, number: int) -> None:
        key, equals, value = field.partition("=")
        known = "slots" if key in _SLOTS else "most" if key in _MOST else ""
        if not known or not equals:
            hint = (
                nearest(key, [*_SLOTS, *_MOST])
                or "after a name come `slots=N` and `max_slots=N`, or nothing; `#` begins a comment"
            )
            self._add(f"`{field}` is not understood", line, number, at, len(field), hint)
        elif known in given:
            self._add(f"`{key}` is given twice for this host", line, number, at, len(field))
        else:
            given[known] = self._number(value, key, line, number, at + len(key) + 1)

    def _number(self, text: str, what: str, line: str, number: int, column: int) -> int | None:
        if text.isascii() and text.isdigit() and 0 < int(text) < 10000:
            return int(text)
        message = f"`{text}` is not a number of {what}: 1 to 9999" if text else f"a number of {what} is missing"
        self._add(message, line, number, column, max(1, len(text)))
        return None

    def all(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        first: dict[str, Host] = {}
        for host in hosts:
            before = first.setdefault(host.address, host)
            if before is not host and host.span is not None and before.span is not None:
                where = f"in line {before.span.line}" if before.span.line != host.span.line else "already"
                self._add(
                    f"`{host.name}` stands {where}", host.source, host.span.line, host.span.column, host.span.width,
                    f"for two workers on it write `{host.name}:2` there",
                )  # fmt: skip
        if self.problems:
            raise RecipeError(self.problems)
        return tuple(hosts)

    def _add(self, message: str, line: str, number: int, column: int, width: int, hint: str = "") -> None:
        self.problems.append(Problem(message, Span(self.path, number, column, width), line, hint))


def workers(hosts: Sequence[Host], nproc: int | None, default: dict[str, int]) -> dict[str, int]:
    """Workers on each host, by name: what `--nproc` says, or else the host's line, or else what is usual there (`default`, by
    name: one per GPU or socket), as far as the line allows. RecipeError where a line forbids it."""
    usual = {host.name: min(default[host.name], host.most or default[host.name]) for host in hosts}
    found = {host.name: nproc or host.slots or usual[host.name] for host in hosts}
    if problems := list(_too_many(hosts, found)):
        raise RecipeError(problems)
    return found


def _too_many(hosts: Sequence[Host], found: dict[str, int]) -> Iterator[Problem]:
    for host in hosts:
        if host.most is not None and found[host.name] > host.most and host.span is not None:
            yield Problem(
                f"{found[host.name]} workers are more than the {host.most} that `{host.name}` may have",
                host.span,
                host.source,
            )
