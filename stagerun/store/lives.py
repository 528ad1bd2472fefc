"""The process lives of a run, a small file for each: OUT/lives/aNNNN.json, NNNN being its attempt.

Rank 0 makes its own as a new file, so that of two that want the same number one fails; it writes it anew while it lives, with a
`beat` that is one higher each time, and at last with the exit code. One without is of a process that lives, or was killed, or
whose disk would not take the last word.
"""

import errno
import hashlib
import itertools
import json
import re
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from stagerun.store.disk import Disk, names_in, twice
from stagerun.store.errors import DAMAGE, reporting
from stagerun.store.layout import attempt_of_life, life_file
from stagerun.system.process import Identity
from stagerun.system.typed import json_object, read_as

MAX_BYTES = 1 << 16

_BEGUN = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}")
_UNKNOWN = Identity("", "", "", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """`run` is a random name, `begun` a time for people. `newest` stands for what there was to go on from. `code`: the exit code
    it ended with, None before. `taken_by`: the attempt that has taken its place, as nothing was heard of it.

    Of a file that can't be read, or is not what its name says, `attempt` alone is known: it is not `readable`, and `run` is a digest of it,
    so that a change shows."""

    attempt: int
    run: str
    process: Identity = _UNKNOWN
    begun: str = ""
    newest: str = ""
    beat: int = 0
    code: int | None = None
    taken_by: int | None = None

    @property
    def readable(self) -> bool:
        return self.process != _UNKNOWN

    def __str__(self) -> str:
        if not self.readable:
            return f"a process that left no readable name in {life_file(Path(), self.attempt).name}"
        return f"process {self.process.pid} on {self.process.host}, since {self.begun}"


def now_text() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def encode(life: Life) -> bytes:
    return (json.dumps(asdict(life), indent=1) + "\n").encode()


def parse(data: bytes, attempt: int) -> Life:
    """The life of a file; one that isn't `readable` for what `encode` doesn't give, or for another attempt: foreign bytes, or torn ones."""
    unreadable = Life(attempt=attempt, run=hashlib.sha256(data).hexdigest())
    try:
        life = read_as(Life, json_object(data))
    except ValueError:
        return unreadable
    process = life.process
    texts = (process.host, process.boot, process.namespace, life.run, life.newest)
    good = life.readable and all(text.isprintable() for text in texts) and _BEGUN.fullmatch(life.begun) is not None
    return life if good and life.attempt == attempt else unreadable


def attempts_of_lives(disk: Disk, out: Path) -> list[int]:
    """Ascending. StorageError, PermissionDenied."""
    folder = life_file(out, 0).parent
    with reporting("list the process lives", folder):
        found = map(attempt_of_life, names_in(disk, folder))
    return sorted(attempt for attempt in found if attempt is not None)


def look_at(disk: Disk, out: Path, attempt: int) -> Life | None:
    """The life of an attempt, None if it has no file. StorageError, PermissionDenied if it can't be known what it says."""
    path = life_file(out, attempt)
    with reporting(f"read {path.name}", path.parent):
        try:
            # ESTALE: another file has taken its name while it was opened, on NFS.
            return parse(twice(partial(disk.read, path, MAX_BYTES), errno.ESTALE), attempt)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in DAMAGE:
                raise
            return parse(b"", attempt)


def last_lives(disk: Disk, out: Path, count: int) -> list[Life]:
    """Those of the highest attempts, at most `count`, ascending. StorageError, PermissionDenied."""
    looks = (look_at(disk, out, attempt) for attempt in reversed(attempts_of_lives(disk, out)))
    # One that is missing has just been cleared away by its holder.
    return [*itertools.islice((life for life in looks if life is not None), count)][::-1]


def newest_life(disk: Disk, out: Path) -> Life | None:
    """That of the highest attempt; None if there is none. StorageError, PermissionDenied."""
    return next(iter(last_lives(disk, out, 1)), None)
