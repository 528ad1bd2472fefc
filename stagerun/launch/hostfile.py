"""On which hosts, and how many workers on each: files as Open MPI, hydra and DeepSpeed read them, or a list."""

import re
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.errors import UsageError

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
    """What `--hosts` was given: a file, or names with commas between them. UsageError with all mistakes."""
    path = Path(given)
    if path.is_dir():
        raise UsageError(
            f"--hosts {given} is a folder", "name a file with a host on each line, or write `--hosts a,b,c`"
        )
    if path.is_file():
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise UsageError(f"--hosts {given} can't be read: {why}") from None
        numbered = [(f"{given}:{number}", line.partition("#")[0].split()) for number, line in enumerate(lines, 1)]
        entries = [(place, words) for place, words in numbered if words]
    elif "/" in given:
        raise UsageError(f"--hosts {given}: no such file", "name a file with a host on each line")
    else:
        entries = [("--hosts", item.split() or [""]) for item in given.split(",")] if given.strip(" ,") else []
    if not entries:
        name = given if path.is_file() else "--hosts"
        raise UsageError(f"{name} names no host", "write `--hosts a,b,c`, or a file with a name on each line")
    hosts: dict[str, Host] = {}
    mistakes: list[str] = []
    for place, (word, *fields) in entries:
        match = _HOST.fullmatch(word)
        slots = match["slots"] if match is not None else None
        for field in fields:
            found = _FIELD.fullmatch(field)
            if found is None:
                mistakes.append(f"{place}: `{field}` is not understood")
            elif not found["most"]:
                slots = found["slots"]
        if match is None:
            mistakes.append(f"{place}: `{word}` is no host" if word else f"{place}: a host's name is missing")
            continue
        host = Host(match["name"], int(slots) if slots else None)
        if hosts.setdefault(host.address, host) is not host:
            mistakes.append(f"{place}: `{host.name}` stands twice; for two workers on it write `{host.name}:2`")
    if mistakes:
        raise UsageError("\n".join(mistakes), _FORMS)
    return tuple(hosts.values())
