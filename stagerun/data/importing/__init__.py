"""Importing: a set of labelled images becomes an LMDB, for `stagerun data import` and for a run whose `source` is a folder of class folders.

`odd` judges single images; `images` has the sources and makes a record of each image; `engine` makes the records in order, commits
and finishes; `partial` is the folder of an unfinished import, and its report. More formats are in `stagerun.tools.data`.

Here: the import for a run, once per disk, by the first process that needs it. It makes the same bytes as `stagerun data import FOLDER LMDB`.
After a kill the next process resumes it.
"""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import DataError, FolderInUseError, ResumeRefused
from stagerun.base.recipe import Data, Import
from stagerun.base.text import count
from stagerun.data.importing.engine import Job, Unusable, run
from stagerun.data.importing.images import PlainImport, folder_files
from stagerun.data.importing.partial import Partial
from stagerun.data.scratch import OR_ELSE, Progress, home_of, require_room
from stagerun.data.write import CopyStopped, Stop, held, writing
from stagerun.system.image_folder import seen, small
from stagerun.system.image_sets import REPORT, is_there

Watch = Callable[[Progress], None]


def have(folder: str, made: Import, data: Data, stop: Stop, watch: Watch = lambda progress: None) -> tuple[str, ...]:
    """Import the images of `folder` unless that is done, and return messages for the user. Any number of processes may call it at once.

    CopyStopped after `stop`; DataError with all unusable images, or if the folder changes meanwhile; StorageError, PermissionDenied.
    """
    target = Path(made.lmdb)
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
        messages: tuple[str, ...] = ()
        if not is_there(made):
            if made.in_scratch:
                require_room(target.parent, {target.name: made.bytes}, data.scratch_reserve)
            messages = _import(folder, made, stop, watch)
        if not made.in_scratch:
            lock.unlink(missing_ok=True)  # while it is held, so that no other process can lock it
        return messages


def _import(folder: str, made: Import, stop: Stop, watch: Watch) -> tuple[str, ...]:
    target, messages = Path(made.lmdb), list[str]()
    _require_same(folder, made)
    work = PlainImport(folder_files(small(folder)), folder)
    threads = len(os.sched_getaffinity(0))
    job = Job(threads, progress=lambda done, total: watch(Progress(done, total)), stop=stop, tell=messages.append)
    try:
        try:
            result = run(work, made.lmdb, job)
        except ResumeRefused:  # another version began it
            result = run(work, made.lmdb, replace(job, restart=True))
    except Unusable as error:
        hint = f"repair or remove them; or leave them out: `stagerun data import {folder} LMDB --max-bad N`, and name that LMDB as `source`"
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
    notes = ", ".join(f"{n} {what}" for what, n in result.counts)
    text = f"{folder}: imported {count(result.records, 'image')} to {target}"
    return (*messages, f"{text}; {notes}: {target / REPORT}" if notes else text)


def _require_same(folder: str, made: Import) -> None:
    if seen(small(folder)).state != made.state:
        raise DataError(
            f"{folder}: was changed while it was imported", "wait until it is complete, then run the same command again"
        )


def remove_others(made: Import, keep: Collection[str]) -> None:
    """Remove earlier states of the same folder from OUT/data, unfinished ones too, but not `keep`, the LMDBs of all hosts. Only the run
    that has locked OUT may do so. A locked import stays. StorageError, PermissionDenied."""
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
                    # Renamed first: a half removed LMDB under its name would be taken for one.
                    removed = old.with_name(f"{old.name.removesuffix('.old')}.old")
                    if removed != old:
                        shutil.rmtree(removed, ignore_errors=True)
                        old.rename(removed)
                    shutil.rmtree(removed, ignore_errors=True)
