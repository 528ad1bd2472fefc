"""A restart loop that gets nowhere: the last few process lives all died, and all began from what there is now. No torch."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from stagerun import store
from stagerun.errors import WORTH_ANOTHER_START, ExitCode, ResumeRefused
from stagerun.recipe import Schedule
from stagerun.spec import canonical
from stagerun.store.faults import reporting
from stagerun.store.layout import results_folder

# Lives without progress after which there is no point in another one; a fault that comes and goes seldom comes three times.
LIMIT = 3

# Ends that a launcher, a scheduler or a batch script answers with another start. Those with another code have told somebody what to do.
_BAD = {None, ExitCode.BUG, *WORTH_ANOTHER_START} - {ExitCode.SAVED}

_MOST_BYTES = 1 << 20  # of a result


def standing(disk: store.Disk, out: Path, schedule: Schedule, found: store.Inventory) -> str:
    """A digest of what there is to go on from: the schedule, the complete snapshots by their names, the results. Any progress changes
    it, and so does an edit of the solver files, which is as good a reason to try again. StorageError, PermissionDenied."""
    digest = hashlib.sha256(canonical(schedule).encode())
    for ref in found.snapshots:
        digest.update(f"\n{ref.name}".encode())
    for name, data in _results(disk, out):
        digest.update(f"\n{name} {hashlib.sha256(data).hexdigest()}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _results(disk: store.Disk, out: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each, b'' for one that can't be read: it is made again."""
    for place in (results_folder(out), results_folder(out) / "ensembles"):
        folder = Path(os.path.realpath(place))  # it may be a link, as in `results`
        with reporting("list the results", folder):
            try:
                names = disk.names(folder)
            except FileNotFoundError:
                continue
        for name in sorted(name for name in names if name.endswith(".json") and not name.startswith(".")):
            try:
                yield name, disk.read(folder / name, _MOST_BYTES)
            except OSError:
                yield name, b""


def require_progress(disk: store.Disk, out: Path, newest: str) -> None:
    """ResumeRefused if the last LIMIT lives were cut off or failed, and all began from `newest`, the `standing` now. StorageError,
    PermissionDenied."""
    if not (lives := fruitless(disk, out, newest)):
        return
    codes = ("was killed, or crashed" if x.code is None else f"ended with exit code {x.code}" for x in lives)
    ends = "; ".join(f"life {life.attempt} ({life}) {end}" for life, end in zip(lives, codes, strict=True))
    more = f"{out}/log.jsonl may say more; " if (out / "log.jsonl").exists() else ""
    raise ResumeRefused(
        f"the last {LIMIT} runs in {out} came to no snapshot and no result, and the next would start where they did: {ends}",
        f"{more}`stagerun run --retry` goes on all the same",
    )


def fruitless(disk: store.Disk, out: Path, newest: str) -> list[store.Life]:
    """The last LIMIT lives, where they were cut off or failed and all began from `newest`; else none. StorageError,
    PermissionDenied."""
    lives = [seen.life for seen in store.last_lives(disk, out, LIMIT) if seen.life is not None]
    return lives if stuck(lives, newest) else []


def stuck(lives: Sequence[store.Life], newest: str) -> bool:
    """Whether `lives`, the last ones, are LIMIT that ended badly and began from `newest`. Pure."""
    return len(lives) == LIMIT and all(life.code in _BAD and life.newest == newest for life in lives)
