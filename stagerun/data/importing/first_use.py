"""A `source` of class folders becomes its LMDB when it is first used: once on a disk, whoever comes first doing it for all.

What comes out is what `stagerun data import FOLDER LMDB` makes, byte for byte. Killed at any moment, the next one goes on where it was.
"""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun.base.errors import DataError, FolderInUseError, ResumeRefused
from stagerun.base.recipe import Data, Import
from stagerun.base.text import count
from stagerun.data.importing.engine import Job, Unusable, run
from stagerun.data.importing.images import PlainImport
from stagerun.data.importing.items import folder_files
from stagerun.data.importing.partial import Partial
from stagerun.data.scratch.layout import (
    OR_ELSE,
    CopyStopped,
    Manifest,
    Original,
    Use,
    held,
    home_of,
    read_manifest,
    take_room,
    write_manifest,
)
from stagerun.data.scratch.staging import GIGABYTE, Progress
from stagerun.data.write import writing
from stagerun.system.files import sync_folder
from stagerun.system.image_folder import seen, small
from stagerun.system.imports import REPORT, is_there

Watch = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Imported:
    """A folder's LMDB, in use by this process until `close`. `said`: for the user; nothing where it was there already."""

    said: tuple[str, ...]
    use: Use | None

    def close(self) -> None:
        if self.use is not None:
            self.use.close()


def have(
    folder: str, made: Import, data: Data, stop: Callable[[], bool], watch: Watch = lambda progress: None
) -> Imported:
    """Imports the images of `folder` unless that was done. Any number of processes may call it at once.

    CopyStopped if `stop` said so; DataError with all images that can't be used, or where the folder changes meanwhile; StorageError,
    PermissionDenied.
    """
    target, said = Path(made.lmdb), tuple[str, ...]()
    lock = target.with_name(f"{target.name}.lock")
    with contextlib.ExitStack() as stack:
        if made.in_scratch:
            assert data.scratch is not None
            stack.enter_context(writing(data.scratch, OR_ELSE))
            home_of(data.scratch)
        else:
            stack.enter_context(writing(made.lmdb))
            target.parent.mkdir(parents=True, exist_ok=True)
        stack.enter_context(held(lock, stop, lambda: watch(Progress(0, made.images, waiting=True))))
        original = Original(folder, os.path.realpath(folder), made.bytes, 0, target.name)
        if not is_there(made):
            if made.in_scratch:
                take_room(target.parent, [original], round(data.scratch_reserve * GIGABYTE), stop, lambda found: None)
            said = _import(folder, made, stop, watch)
        if not made.in_scratch:
            lock.unlink(missing_ok=True)  # while it is held, so that no one else can have it
            return Imported(said, None)
        if read_manifest(target) is None:  # as the copies in scratch have one, which are removed by who needs room
            write_manifest(target, Manifest(source=original.real, size=(target / "data.mdb").stat().st_size))
        return Imported(said, Use(target))


def _import(folder: str, made: Import, stop: Callable[[], bool], watch: Watch) -> tuple[str, ...]:
    """What the user should know of it."""
    target, said = Path(made.lmdb), list[str]()
    _require_same(folder, made)
    work = PlainImport(folder_files(small(folder)), folder)
    threads = len(os.sched_getaffinity(0))
    job = Job(threads, progress=lambda done, total: watch(Progress(done, total)), stop=stop, tell=said.append)
    try:
        try:
            result = run(work, made.lmdb, job)
        except ResumeRefused:  # begun by another version
            result = run(work, made.lmdb, replace(job, restart=True))
    except Unusable as error:
        hint = f"repair or remove them; or go without them: `stagerun data import {folder} LMDB --max-bad N`, and name that LMDB as `source`"
        raise DataError(error.message, hint) from None
    except DataError as error:
        if "--restart" not in error.hint:
            raise
        raise DataError(error.message, f"remove {target}.partial, then run the same command again") from None
    if not result.complete:
        raise CopyStopped
    try:
        _require_same(folder, made)
    except DataError:  # it may be a mixture of two states
        shutil.rmtree(target, ignore_errors=True)
        raise
    odd = ", ".join(f"{n} {what}" for what, n in result.counts)
    text = f"{folder}: imported {count(result.records, 'image')} to {target}"
    return (*said, f"{text}; {odd}: {target / REPORT}" if odd else text)


def _require_same(folder: str, made: Import) -> None:
    if seen(small(folder)).state != made.state:
        raise DataError(
            f"{folder}: was changed while it was imported", "wait until it is complete, then run the same command again"
        )


def remove_others(made: Import, keep: Collection[str]) -> None:
    """Earlier states of the same folder in OUT/data, unfinished ones, too. Only for the run that has locked OUT: another may read them.
    `keep`: the LMDBs of all hosts, whose files may have other times. One that is being imported is locked, and stays. StorageError,
    PermissionDenied."""
    target = Path(made.lmdb)
    folder, kept = target.name.rpartition("-")[0], {Path(lmdb).name for lmdb in keep} | {target.name}
    with writing(made.lmdb):
        for old in sorted(target.parent.glob(f"{glob.escape(folder)}-*")):
            name = old.name.removesuffix(".partial")
            if name in kept or not re.fullmatch(rf"{re.escape(folder)}-[0-9a-f]{{16}}(\.old)?", name):
                continue
            # A host that shares OUT may be faster.
            with contextlib.suppress(FileNotFoundError, FolderInUseError, DataError):
                if old.name.endswith(".partial"):
                    with Partial(old.with_suffix("")) as partial:
                        partial.remove()
                elif old.is_dir() and not old.is_symlink():
                    # Renamed first: half removed it must not count as there.
                    gone = old.with_name(f"{old.name.removesuffix('.old')}.old")
                    if gone != old:
                        shutil.rmtree(gone, ignore_errors=True)  # of a removal that was cut short
                        old.rename(gone)
                    sync_folder(old.parent)
                    shutil.rmtree(gone, ignore_errors=True)
