"""The process lives of a run, a small file for each: OUT/lives/aNNNN.json, NNNN being its attempt.

Rank 0 makes its own as a new file, so that of two that want the same number one fails; it writes it anew while it lives, with a
`beat` that is one higher each time, and at last with the exit code. One without is of a process that lives, or was killed, or
whose disk would not take the last word.

A file that can't be read, or is not what its name says, is of a life nothing is known of.
"""

import errno
import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun.store.disk import Disk
from stagerun.store.errors import DAMAGE, reporting
from stagerun.store.layout import attempt_of_life, life_name, lives_folder
from stagerun.system.process import Identity
from stagerun.system.typed import json_object, read_as

MAX_BYTES = 1 << 16

_BEGUN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`run` is a random name, `begun` a time for people. `newest` stands for what there was to go on from. `code`: the exit code
    it ended with, None before. `taken_by`: the attempt that has taken its place, as nothing was heard of it."""

    attempt: int
    run: str
    process: Identity
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


def now_text() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def encode(life: Life) -> bytes:
    return (json.dumps(asdict(life), indent=1) + "\n").encode()


def parse(data: bytes, attempt: int) -> Life | None:
    """None for what `encode` doesn't give, or for another attempt: foreign bytes, or torn ones."""
    try:
        life = read_as(Life, json_object(data))
    except ValueError:
        return None
    process = life.process
    texts = (process.host, process.boot, process.namespace, life.run, life.newest)
    good = all(text.isprintable() for text in texts) and _BEGUN.fullmatch(life.begun) is not None
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
