"""On which hosts, and how many workers on each: files as Open MPI, hydra and DeepSpeed read them, or a list."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import Problem, RecipeError, Span, UsageError

_HOST = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?"
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+(?:%\w+)?\]))(?::(?P<slots>[1-9][0-9]{0,2}))?"
)
# max_slots is about jobs that ask for more than `slots`, which nothing here does.
_FIELD = re.compile(r"(?P<most>max[_-])?slots=(?P<slots>[1-9][0-9]{0,3})")
_FORMS = (
    "write `host`, `host:2` or `host slots=2` for two workers; an IPv6 address stands in brackets, a port in ~/.ssh/config or "
    '`--ssh "ssh -p 2222"`, a comment behind `#`'
)


@dataclass(frozen=True, slots=True)
class Host:
    """`name`: as ssh takes it, `user@` included. `slots`: workers that it is to have; None: nothing says."""

    name: str
    slots: int | None = None

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
            lines = list(enumerate(path.read_text().splitlines(), 1))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise UsageError(f"--hosts {given} can't be read: {why}") from None
        words = [(list(re.finditer(r"\S+", line.partition("#")[0])), line, number) for number, line in lines]
        entries = [
            ([(m.group(), m.start() + 1) for m in found], line, number) for found, line, number in words if found
        ]
    elif "/" in given:
        raise UsageError(f"--hosts {given}: no such file", "name a file with a host on each line")
    else:
        begins = [0, *(m.end() for m in re.finditer(",", given))]
        items = [(item, begin) for item, begin in zip(given.split(","), begins, strict=True) if given.strip(" ,")]
        entries = [([(item.strip(), begin + len(item) - len(item.lstrip()) + 1)], given, 1) for item, begin in items]
        given = "--hosts"
    if not entries:
        raise UsageError(f"{given} names no host", "write `--hosts a,b,c`, or a file with a name on each line")
    return _hosts(entries, given)


def _hosts(entries: Iterable[tuple[Sequence[tuple[str, int]], str, int]], path: str) -> tuple[Host, ...]:
    """Of each entry: its words with the columns where they begin, the line, its number. RecipeError."""
    problems: list[Problem] = []
    hosts: dict[str, Host] = {}
    lines: dict[str, int] = {}
    for ((word, column), *fields), line, number in entries:
        found, slots = _HOST.fullmatch(word), None
        wrong = (
            [] if found else [(word, column, f"`{word}` is no host" if word else "a host's name is missing", _FORMS)]
        )
        if found is not None and found["slots"]:
            slots = int(found["slots"])
        for field, at in fields:
            match = _FIELD.fullmatch(field)
            if match is None:
                wrong.append((field, at, f"`{field}` is not understood", _FORMS))
            elif not match["most"]:
                slots = int(match["slots"])
        if found is not None:
            host = Host(found["name"], slots)
            if host.address in hosts:
                where = f"in line {lines[host.address]}" if lines[host.address] != number else "already"
                hint = f"for two workers on it write `{host.name}:2` there"
                wrong.append((word, column, f"`{host.name}` stands {where}", hint))
            hosts.setdefault(host.address, host)
            lines.setdefault(host.address, number)
        problems += [
            Problem(message, Span(path, number, at, len(odd) or 1), line, hint) for odd, at, message, hint in wrong
        ]
    if problems:
        raise RecipeError(problems)
    return tuple(hosts.values())
