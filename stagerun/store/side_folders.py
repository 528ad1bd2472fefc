"""Output folders that a command makes for itself beside OUT, with some of OUT's snapshots, and the way back. Not for a folder that others may
write."""

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from stagerun.store.disk import Disk, make_folder
from stagerun.store.errors import reporting
from stagerun.store.layout import choices_folder, parse_name, results_folder, snapshots_folder


def borrow(source: Path, target: Path, names: Collection[str]) -> None:
    """`target` becomes an output folder with these snapshots of `source`, and with its results and choices, which then are not made again.

    The files of snapshots are hard links, or copies where they can't be: a run adds folders and deletes names, and never writes into a
    snapshot. StorageError, PermissionDenied.
    """
    with reporting("make a folder with snapshots of another", target):
        snapshots_folder(target).mkdir(parents=True, exist_ok=True)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                shutil.copytree(folder(source), folder(target), dirs_exist_ok=True)
        for name in names:
            if not (made := snapshots_folder(target) / name).exists():
                shutil.copytree(snapshots_folder(source) / name, made, copy_function=_linked)


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy(source, target)


def give_back(disk: Disk, source: Path, target: Path, stage: str) -> None:
    """Moves the snapshots of a stage, the results and the choices that `target` has not, from `source`, which no run holds any more. Each is
    whole under its name at any moment; a call after a crash does the rest. StorageError, PermissionDenied."""
    with reporting("take over what was trained", target):
        _move(disk, snapshots_folder(source), snapshots_folder(target), lambda path: _stage_of(path) == stage)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                _move(disk, folder(source), folder(target), Path.is_file)


def _stage_of(snapshot: Path) -> str | None:
    place = parse_name(snapshot.name)
    return place.stage if place is not None else None


def _move(disk: Disk, source: Path, target: Path, wanted: Callable[[Path], bool]) -> None:
    make_folder(disk, target)
    for name in sorted(disk.names(source)):
        if wanted(source / name) and not (target / name).exists():
            disk.rename(source / name, target / name)
    disk.sync_folder(target)
