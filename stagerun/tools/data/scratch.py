"""`stagerun data stage` and `unstage`: which LMDBs and which disk are meant, and what is said about it."""

import os
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

from stagerun.base.errors import ExitCode, UsageError
from stagerun.base.recipe import Data
from stagerun.base.text import duration, size
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.progress import BYTES, Shown
from stagerun.command.shared import FiniteRange, Folder
from stagerun.data import scratch as scratch_disk
from stagerun.data.importing.first_use import have
from stagerun.data.scratch import Copy, CopyStopped, Found, How, Progress, look
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.launch import StopRequest
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.imports import import_of
from stagerun.train.output import is_schedule

_DEFAULT_RESERVE = 1.0

Scratch = Annotated[
    str | None,
    option("--scratch FOLDER", "Folder on this node's fast disk.  [default: `scratch` of the schedule]"),
]
SetOfSchedule = Annotated[tuple[str, ...], option("--set FIELD=VALUE", "Change a field of the schedule. Repeatable.")]


@dataclass(frozen=True, slots=True)
class Target:
    sources: tuple[str, ...]
    scratch: str
    reserve: float
    data: Data | None = None  # of a schedule, whose sources may be folders of class folders


@command()
def stage(
    target: Folder,
    overrides: SetOfSchedule = (),
    scratch: Scratch = None,
    reserve: float | None = option(
        "--reserve GB",
        "Gigabytes that stay free there.  [default: `scratch_reserve` of the schedule, 1]",
        type=FiniteRange(0, max=1_000_000_000),
    ),
    verify: bool = flag("--verify", "Read copies that are there already, and mend what is not as it was."),
) -> None:
    """Has copies of the images on this node's scratch disk, as `run` would make them; `run` then finds them there.

    DIR is a schedule's folder or that of one LMDB. Every block is read back from the disk and compared with what was read from
    the source. A copy that is there is not made again; where room is missing, copies that stagerun made and no one uses are
    removed, the longest unused first. Any number of processes may do this at once, on one node and on many:

    \b
    srun --ntasks-per-node=1 stagerun data stage solvers/resnet50_72ep

    Interrupted, by whatever means, the same command goes on where it was; exit code 75 if it was asked to stop.
    """
    found = _target(target, overrides, scratch)
    folders = [path for path in found.sources if found.data is not None and is_class_folder(path)]
    originals = [look(path) for path in found.sources if path not in folders]
    stop = StopRequest("what is copied stays", "this piece")
    stop.install()
    keeps = found.reserve if reserve is None else reserve
    with Shown(f"copying to {found.scratch}", noun=BYTES) as shown:

        def watch(progress: Progress) -> None:
            shown.progress(progress.done, progress.total, "another process has copied" if progress.waiting else "")

        def removed(copy: Found) -> None:
            shown.say(f"removed, to make room: {_described(copy)}")

        try:
            copies = scratch_disk.stage(
                originals, found.scratch, keeps, stop=stop, watch=watch, removed=removed, verify=verify
            )
            for path in folders:
                _import(path, replace(found, reserve=keeps), stop)
        except CopyStopped:
            shown.say("stopped; the same command goes on where it was")
            sys.exit(ExitCode.SAVED)
    for copy in copies:
        copy.close()
        show(_line(copy))


def _import(folder: str, target: Target, stop: StopRequest) -> None:
    """Into the place where `run` looks for it."""
    assert target.data is not None
    data = replace(target.data, scratch=target.scratch, scratch_reserve=target.reserve)
    made = import_of(small(folder), target.scratch, "")
    with Shown("import") as shown:
        imported = have(folder, made, data, stop, lambda one: shown.progress(one.done, one.total))
    imported.close()
    show("\n".join(imported.said) or f"{folder}: was imported: {made.lmdb}")


def _line(copy: Copy) -> str:
    text = f"{copy.original.path}: {copy.how.value}"
    if copy.how is How.MENDED or copy.how is How.COPIED:
        text += f", {size(copy.bytes)} in {duration(copy.seconds)}"
        if copy.seconds:
            text += f", {size(copy.bytes / copy.seconds)}/s"
    else:
        text += f", {size(copy.original.size)}"
    return f"{text}: {copy.path}"


@command()
def unstage(
    target: str | None = argument("[DIR]", default=None),
    overrides: SetOfSchedule = (),
    scratch: Scratch = None,
    everything: bool = flag("--all", "All copies of yours in --scratch, in place of those of DIR."),
    dry_run: bool = flag("--dry-run", "Only say what would be removed."),
) -> None:
    """Removes the copies of DIR's images from this node's scratch disk: older states and interrupted copies, too.

    DIR is a schedule's folder or that of one LMDB, which may be gone itself. Copies that a run reads or makes are kept. Nothing
    else is touched.
    """
    if everything == (target is not None):
        raise UsageError("give DIR or --all", "--all removes all copies of yours below --scratch")
    if everything and overrides:
        raise UsageError("--set is for a schedule's folder, and --all reads none", "leave one of them out")
    sources = None
    if target is not None:
        found = _target(target, overrides, scratch, must_exist=False)
        scratch, sources = found.scratch, found.sources
    if scratch is None:
        raise UsageError("--all needs --scratch", "name the folder that `scratch` under `data` names")
    removals = scratch_disk.unstage(scratch, sources, dry_run)
    for removal in removals:
        kept = f"kept: it {removal.kept}"
        word = kept if removal.kept else "would be removed" if dry_run else "removed"
        show(f"{word}: {_described(removal.copy)}")
    if not removals:
        show(f"nothing to remove in {scratch}")


def _described(found: Found) -> str:
    what = "interrupted copy" if found.partial else "copy"
    used = datetime.fromtimestamp(found.used).strftime("%Y-%m-%d %H:%M")
    return f"{what} of {found.manifest.source}, {size(found.bytes)}, last used {used}: {found.folder}"


def _target(target: str, overrides: tuple[str, ...], scratch: str | None, must_exist: bool = True) -> Target:
    """The LMDBs and the disk that are meant; what needn't exist counts as an LMDB if it is not a schedule. UsageError, DataError, and
    what `load` says."""
    schedule = Path(target) / SCHEDULE_FILE
    if is_schedule(target) if must_exist else os.path.exists(schedule):
        of = load(target, overrides)
        data = of.data
        scratch = scratch or data.scratch
        if scratch is None:
            raise UsageError(f"{schedule} has no `scratch` under `data`", "name the disk with --scratch")
        sources = tuple(source.path for source in of.sources)
        return Target(sources, scratch, data.scratch_reserve, data)
    if overrides:
        raise UsageError(f"--set is for schedules, and there is no {schedule}", "leave it out")
    if scratch is None:
        raise UsageError(
            f"there is no {schedule}, and an LMDB needs --scratch", "name the folder on this node's fast disk"
        )
    return Target((target,), scratch, _DEFAULT_RESERVE)
