"""The process lives of a run, a small file for each: OUT/lives/aNNNN.json, NNNN being its attempt.

Rank 0 makes its own as a new file, so that of two that want the same number one fails; it writes it anew while it lives, with a
`beat` that is one higher each time, and at last with the exit code. One without is of a process that lives, or was killed, or
whose disk would not take the last word.

A file that can't be read, or is not what its name says, is of a life nothing is known of.
"""

import errno
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun.store.disk import Disk
from stagerun.store.faults import DAMAGE, reporting
from stagerun.store.layout import attempt_of_life, life_name, lives_folder
from stagerun.world import boot_id

MAX_BYTES = 1 << 16

_BEGUN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}")


@dataclass(frozen=True, slots=True)
class Process:
    """A process among those of all hosts and boots. `boot` is the kernel's own name for the time since it was booted, '' where it
    has none; `namespace` that of its process numbers; `born` when it began, in clock ticks since the boot (proc_pid_stat(5),
    field 22): a number that the kernel gives to another process later comes with another one."""

    host: str
    boot: str
    namespace: str
    pid: int
    born: int

    def same_machine(self, other: "Process") -> bool:
        """Whether it runs, or ran, under the very kernel that `other` does, with numbers that mean the same. A host's name alone
        tells nothing: there may be two, and it outlives a reboot."""
        mine, its = ((p.host, p.boot, p.namespace) for p in (self, other))
        return bool(self.boot) and mine == its

    def alive(self) -> bool:
        """To be asked on the same machine. A zombie is dead: all that it held is given up."""
        state, born = _stat(str(self.pid))
        return state not in ("", "Z", "X") and born == self.born


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`run` is a random name, `begun` a time for people. `newest` stands for what there was to go on from. `code`: the exit code
    it ended with, None before. `taken_by`: the attempt that has taken its place, as nothing was heard of it."""

    attempt: int
    run: str
    process: Process
    begun: str
    newest: str
    beat: int = 0
    code: int | None = None
    taken_by: int | None = None

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.host}, since {self.begun}"


@dataclass(frozen=True, slots=True)
class Seen:
    """The file of a life as it was found: `life` is None if it can't be read."""

    attempt: int
    data: bytes
    life: Life | None

    def __str__(self) -> str:
        return str(self.life) if self.life else f"a process that left no readable name in {life_name(self.attempt)}"


def this_process() -> Process:
    return Process(
        host=os.uname().nodename,
        boot=boot_id(),
        namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        born=_stat("self")[1],
    )


def now_text() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def encode(life: Life) -> bytes:
    return (json.dumps(asdict(life), indent=1) + "\n").encode()


def parse(data: bytes, attempt: int) -> Life | None:
    """None for what `encode` doesn't give, or for another attempt: somebody else's bytes, or torn ones."""
    try:
        body = json.loads(data)
        process = Process(**body.pop("process"))
        life = Life(process=process, **body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    texts = (process.host, process.boot, process.namespace, life.run, life.newest)
    counts = (process.pid, process.born, life.attempt, life.beat)
    perhaps = (life.code, life.taken_by)
    good = (
        all(isinstance(text, str) and text.isprintable() for text in texts)
        and all(type(number) is int and number >= 0 for number in counts)
        and all(number is None or type(number) is int for number in perhaps)
        and isinstance(life.begun, str)
        and _BEGUN.fullmatch(life.begun) is not None
    )
    return life if good and life.attempt == attempt else None


def attempts_of_lives(disk: Disk, out: Path) -> list[int]:
    """Ascending. StorageError, PermissionDenied."""
    with reporting("list the process lives", lives_folder(out)):
        try:
            names = disk.names(lives_folder(out))
        except FileNotFoundError:
            return []
    return sorted(attempt for attempt in map(attempt_of_life, names) if attempt is not None)


def look_at(disk: Disk, out: Path, attempt: int) -> Seen | None:
    """The file of a life, None if there is none. StorageError, PermissionDenied if it can't be known what it says."""
    path = lives_folder(out) / life_name(attempt)
    with reporting(f"read {path.name}", path.parent):
        try:
            try:
                data = disk.read(path, MAX_BYTES)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                data = disk.read(path, MAX_BYTES)  # another file has taken its name while it was opened, on NFS
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            return Seen(attempt, b"", None)
    return Seen(attempt, data, parse(data, attempt))


def newest_life(disk: Disk, out: Path) -> Seen | None:
    """That of the highest attempt; None if there is none. StorageError, PermissionDenied."""
    for attempt in reversed(attempts_of_lives(disk, out)):
        if (seen := look_at(disk, out, attempt)) is not None:  # else its holder has just cleared it away
            return seen
    return None


def last_lives(disk: Disk, out: Path, count: int) -> list[Seen]:
    """Those of the highest attempts, at most `count`, ascending. StorageError, PermissionDenied."""
    found = (look_at(disk, out, attempt) for attempt in attempts_of_lives(disk, out)[-count:])
    return [seen for seen in found if seen is not None]


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:  # no Linux, or a box that hides it
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _stat(pid: str) -> tuple[str, int]:
    """(state, start in ticks) of a process; ('', 0) if there is none."""
    # Its own name, in brackets, may hold spaces and brackets.
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)
