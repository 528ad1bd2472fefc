"""`stagerun data stage` and `unstage`: which LMDBs and which disk are meant, and what is said about it."""

import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from stagerun.cli.ending import tell
from stagerun.data.scratch import Copy, CopyStopped, Found, How, Progress, look, stage, unstage
from stagerun.errors import DataError, ExitCode, UsageError
from stagerun.launch import StopRequest
from stagerun.spec import load
from stagerun.text import duration, size

_DEFAULT_RESERVE = 1.0


@dataclass(frozen=True, slots=True)
class Target:
    sources: tuple[str, ...]
    scratch: str
    reserve: float


def stage_images(
    target: str, overrides: tuple[str, ...], scratch: str | None, reserve: float | None, verify: bool
) -> None:
    found = _target(target, overrides, scratch)
    originals = [look(path) for path in found.sources]
    stop = StopRequest("what is copied stays", "this piece")
    stop.install()
    keeps = found.reserve if reserve is None else reserve
    with _Shown(f"copying to {found.scratch}") as shown:
        try:
            copies = stage(originals, found.scratch, keeps, stop=stop, watch=shown, removed=_say_removed, verify=verify)
        except CopyStopped:
            tell("stopped; the same command goes on where it was")
            sys.exit(ExitCode.SAVED)
    for copy in copies:
        copy.close()
        click.echo(_line(copy))


def _say_removed(found: Found) -> None:
    tell(f"removed, to make room: {_described(found)}")


def _line(copy: Copy) -> str:
    text = f"{copy.original.path}: {copy.how.value}"
    if copy.how is How.MENDED or copy.how is How.COPIED:
        text += f", {size(copy.bytes)} in {duration(copy.seconds)}"
        if copy.seconds:
            text += f", {size(copy.bytes / copy.seconds)}/s"
    else:
        text += f", {size(copy.original.size)}"
    return f"{text}: {copy.path}"


def unstage_images(
    target: str | None, overrides: tuple[str, ...], scratch: str | None, everything: bool, dry_run: bool
) -> None:
    if everything == (target is not None):
        raise UsageError("give DIR or --all", "--all removes all copies of yours below --scratch")
    sources = None
    if target is not None:
        found = _target(target, overrides, scratch, must_exist=False)
        scratch, sources = found.scratch, found.sources
    if scratch is None:
        raise UsageError("--all needs --scratch", "name the folder that `scratch` under `data` names")
    removals = unstage(scratch, sources, dry_run)
    for removal in removals:
        kept = f"kept: it {removal.kept}"
        word = kept if removal.kept else "would be removed" if dry_run else "removed"
        click.echo(f"{word}: {_described(removal.copy)}")
    if not removals:
        click.echo(f"nothing to remove in {scratch}")


def _described(found: Found) -> str:
    what = "interrupted copy" if found.partial else "copy"
    used = datetime.fromtimestamp(found.used).strftime("%Y-%m-%d %H:%M")
    return f"{what} of {found.manifest.source}, {size(found.bytes)}, last used {used}: {found.folder}"


def _target(target: str, overrides: tuple[str, ...], scratch: str | None, must_exist: bool = True) -> Target:
    """The LMDBs and the disk that are meant. UsageError, and what `load` and the LMDB's files say."""
    folder = Path(target)
    schedule = folder / "schedule.prototxt"
    if schedule.exists() or (folder.is_dir() and not (folder / "data.mdb").exists() and must_exist):
        data = load(target, overrides).data
        scratch = scratch or data.scratch
        if scratch is None:
            raise UsageError(f"{schedule} has no `scratch` under `data`", "name the disk with --scratch")
        sources = (data.train.path, *((data.val.path,) if data.val else ()))
        return Target(sources, scratch, data.scratch_reserve)
    if must_exist and not folder.exists():
        raise DataError(f"{target}: no such folder", "give the folder of a schedule, or that of an LMDB")
    if overrides:
        raise UsageError(f"--set is for schedules, and {target} is an LMDB", "leave it out")
    if scratch is None:
        raise UsageError("an LMDB needs --scratch", "name the folder on this node's fast disk")
    return Target((target,), scratch, _DEFAULT_RESERVE)


class _Shown:
    """How far it is: one line that is written over on a terminal, else a line every ten seconds. On stderr."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._console = Console(stderr=True)
        self._every = 0.2 if self._console.is_terminal else 10.0
        self._lock = threading.Lock()
        self._begun, self._next = time.monotonic(), 0.0
        self._status = self._console.status(Text(what)) if self._console.is_terminal else None

    def __enter__(self) -> "_Shown":
        self._begun = time.monotonic()
        self._next = self._begun + self._every
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, progress: Progress) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + self._every
            text = f"{self._what}: {self._text(progress, now - self._begun)}"
            if self._status is not None:
                self._status.update(Text(text))
            else:
                tell(text)

    def _text(self, progress: Progress, seconds: float) -> str:
        text = f"{size(progress.done)} of {size(progress.total)}"
        if progress.waiting:
            return f"another process has copied {text}"
        if progress.done:
            left = (progress.total - progress.done) * seconds / progress.done
            text += f", {size(progress.done / seconds)}/s, {duration(left)} left"
        return text
