"""Names of the files and folders in an output folder. Pure."""

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
_ATTEMPT = r"a(?P<attempt>[0-9]{4}|[1-9][0-9]{4,})"
_SNAPSHOT = re.compile(
    r"(?:\.(?P<state>tmp|bad|trash)-)?"
    rf"(?P<stage>[A-Za-z0-9_-]+)-(?P<iter>[0-9]{{8}}|[1-9][0-9]{{8,}})-{_ATTEMPT}(?P<suffix>-[0-9a-f]+)?"
)
_LIFE = re.compile(rf"{_ATTEMPT}\.json")
_LEFTOVER = re.compile(r"\.(?:tmp|trash)-.*-[0-9a-f]{8}", re.DOTALL)


class Place(NamedTuple):
    """The parts of a snapshot's name."""

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
    """Return the folder of ensembles that make one network: a folder for each, with a `snapshots` in it as `out` has."""
    return out / "averages"


def choices_folder(out: Path) -> Path:
    return out / "choices"


def lock_file(out: Path) -> Path:
    return out / "lock"


def life_file(out: Path, attempt: int) -> Path:
    """Return the file of a process life: `lives/a0002.json`."""
    return out / "lives" / f"a{attempt:04d}.json"


def attempt_of_life(name: str) -> int | None:
    """Return the attempt in the name of a life's file; None for another name."""
    match = _LIFE.fullmatch(name)
    return int(match["attempt"]) if match else None


def snapshot_name(stage: str, iter: int, attempt: int) -> str:
    """Return a snapshot's name. ValueError for a stage with other characters than letters, digits, `_`, `-`, or a negative number.

    >>> snapshot_name("cyc1", 7638, 2)
    'cyc1-00007638-a0002'
    """
    if not _STAGE.fullmatch(stage) or iter < 0 or attempt < 0:
        raise ValueError(f"not the place of a snapshot: {stage!r}, {iter}, {attempt}")
    return f"{stage}-{iter:08d}-a{attempt:04d}"


@lru_cache(1 << 14)  # a tree of many stages asks again and again
def parse_folder(name: str) -> tuple[str, Place] | None:
    """Return the state and the parts of a snapshot folder's name; None for another name. The state is '' for a complete snapshot, `tmp` while
    it is written, `bad` if it was set aside, `trash` while it is deleted.

    >>> parse_folder(".bad-cyc1-00007638-a0002-2")
    ('bad', Place(stage='cyc1', iter=7638, attempt=2))"""
    match = _SNAPSHOT.fullmatch(name)
    if match is None or (match["suffix"] and not match["state"]):
        return None
    return match["state"] or "", Place(match["stage"], int(match["iter"]), int(match["attempt"]))


def parse_name(name: str) -> Place | None:
    """Invert `snapshot_name`; return None for any other name."""
    state, parts = parse_folder(name) or ("", None)
    return None if state else parts


def temp_name(name: str, state: str = "tmp") -> str:
    """Return a fresh name to write under, or with `trash` to delete under. Never the same twice: an earlier one may not be empty yet."""
    return f".{state}-{name}-{os.urandom(4).hex()}"


def is_leftover(name: str) -> bool:
    """Return whether a name is from `temp_name`: with the lock held, no process uses it any more. Similar names that a person made are kept."""
    return _LEFTOVER.fullmatch(name) is not None
