"""What the files and folders of an output folder are called. Pure."""

import os
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

MANIFEST = "MANIFEST.json"
MAX_FILES = 64  # of a snapshot, besides the manifest
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # of a file in a snapshot: no `..`, nothing hidden, no `/`

_STAGE = re.compile(r"[A-Za-z0-9_-]+")
# One spelling for each number: zeros in front only up to the usual width, so that no two names mean one snapshot.
_SNAPSHOT = r"(?P<stage>[A-Za-z0-9_-]+)-(?P<iter>[0-9]{8}|[1-9][0-9]{8,})-a(?P<attempt>[0-9]{4}|[1-9][0-9]{4,})"
_COMPLETE = re.compile(_SNAPSHOT)
_LIFE = re.compile(r"a(?P<attempt>[0-9]{4}|[1-9][0-9]{4,})\.json")
_ASIDE = re.compile(rf"\.bad-{_SNAPSHOT}(?:-[0-9]+)?")
_ANY = re.compile(rf"(?:\.(?:tmp|bad|trash)-)?{_SNAPSHOT}(?:-[0-9a-f]+)?")
_DELETED = re.compile(rf"\.trash-(?P<name>{_SNAPSHOT})-[0-9a-f]+")
_TEMP, _BAD, _TRASH = ".tmp-", ".bad-", ".trash-"
_LEFTOVER = re.compile(r"\.(?:tmp|trash)-.*-[0-9a-f]{8}", re.DOTALL)


class Place(NamedTuple):
    """What a snapshot's name says."""

    stage: str
    iter: int
    attempt: int


def snapshots_folder(out: Path) -> Path:
    return out / "snapshots"


def pins_folder(out: Path) -> Path:
    return out / "pins"


def results_folder(out: Path) -> Path:
    return out / "results"


def averages_folder(out: Path) -> Path:
    """Of ensembles that make one network: a folder for each, with a `snapshots` in it as `out` has."""
    return out / "averages"


def choices_folder(out: Path) -> Path:
    return out / "choices"


def lock_file(out: Path) -> Path:
    return out / "lock"


def lives_folder(out: Path) -> Path:
    return out / "lives"


def life_name(attempt: int) -> str:
    """The file of a process life: `a0002.json`."""
    return f"a{attempt:04d}.json"


def attempt_of_life(name: str) -> int | None:
    """The inverse of `life_name`; None for a name it doesn't give."""
    match = _LIFE.fullmatch(name)
    return int(match["attempt"]) if match else None


def snapshot_name(stage: str, iter: int, attempt: int) -> str:
    """`cyc1-00007638-a0002`. ValueError for a stage with other characters than letters, digits, `_`, `-`, or a negative number.

    >>> snapshot_name("cyc1", 7638, 2)
    'cyc1-00007638-a0002'
    """
    if not _STAGE.fullmatch(stage) or iter < 0 or attempt < 0:
        raise ValueError(f"not the place of a snapshot: {stage!r}, {iter}, {attempt}")
    return f"{stage}-{iter:08d}-a{attempt:04d}"


@lru_cache(1 << 14)  # a tree of many stages asks again and again
def parse_name(name: str) -> Place | None:
    """The inverse of `snapshot_name`; None for a name it doesn't give.

    >>> parse_name("cyc1-00007638-a0002")
    Place(stage='cyc1', iter=7638, attempt=2)
    """
    match = _COMPLETE.fullmatch(name)
    return Place(match["stage"], int(match["iter"]), int(match["attempt"])) if match else None


def attempt_of(name: str) -> int | None:
    """The attempt in the name of a snapshot, be it complete, in progress, set aside or being deleted; else None."""
    match = _ANY.fullmatch(name)
    return int(match["attempt"]) if match else None


def temp_name(name: str) -> str:
    """A fresh name to write under: no one else knows it."""
    return f"{_TEMP}{name}-{os.urandom(4).hex()}"


def trash_name(name: str) -> str:
    """A fresh name to delete under. Never the same twice, since an earlier one may not be empty yet."""
    return f"{_TRASH}{name}-{os.urandom(4).hex()}"


def bad_name(name: str, count: int) -> str:
    """The name of a damaged snapshot that is set aside; `count` is above 1 when that name is taken."""
    return f"{_BAD}{name}" + (f"-{count}" if count > 1 else "")


def place_aside(name: str) -> Place | None:
    """What the name of a snapshot that was set aside says; None for another name."""
    match = _ASIDE.fullmatch(name)
    return Place(match["stage"], int(match["iter"]), int(match["attempt"])) if match else None


def in_trash(name: str) -> str | None:
    """The snapshot that was being deleted under that name; None for another name."""
    match = _DELETED.fullmatch(name)
    return match["name"] if match else None


def is_leftover(name: str) -> bool:
    """Whether it was being written or deleted under a name of `temp_name` or `trash_name`: no one's, once the lock is held.
    What a person has called so by hand is theirs."""
    return _LEFTOVER.fullmatch(name) is not None
