"""Snapshots under a second name: a folder that has some of another output folder's, and the way back. Not for a folder that others may write."""

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from stagerun.store.disk import Disk
from stagerun.store.errors import reporting
from stagerun.store.layout import choices_folder, parse_name, results_folder, snapshots_folder


def borrow(source: Path, target: Path, names: Collection[str]) -> None:
    """`target` becomes an output folder with these snapshots of `source`, and with its results and choices, which then are not made again.

    The files are hard links, or copies where they can't be: a run adds folders and deletes names, and never writes into a snapshot.
    StorageError, PermissionDenied.
    """
    with reporting("make a folder with snapshots of another", target):
        snapshots_folder(target).mkdir(parents=True, exist_ok=True)
        for folder in (results_folder, choices_folder):
            if folder(source).is_dir():
                shutil.copytree(folder(source), folder(target), dirs_exist_ok=True)
        for name in names:
            made = snapshots_folder(target) / name
            if made.exists():
                continue
            made.mkdir()
            for file in (snapshots_folder(source) / name).iterdir():
                try:
                    os.link(file, made / file.name, follow_symlinks=False)
                except OSError:
                    shutil.copy(file, made / file.name)


def give_back(disk: Disk, source: Path, target: Path, stage: str) -> None:
    """Moves the snapshots of a stage, the results and the choices that `target` has not, from `source`, which no run holds any more. Each is
    whole under its name at any moment; a call after a crash does the rest. StorageError, PermissionDenied."""
    with reporting("take over what was trained", target):
        for name in sorted(disk.names(snapshots_folder(source))):
            place = parse_name(name)
            if place is not None and place.stage == stage and not (snapshots_folder(target) / name).exists():
                disk.rename(snapshots_folder(source) / name, snapshots_folder(target) / name)
        disk.sync_folder(snapshots_folder(target))
        for folder in (results_folder, choices_folder):
            if not folder(source).is_dir():
                continue
            with suppress(FileExistsError):
                disk.mkdir(folder(target))
            for file in sorted(folder(source).iterdir()):
                if file.is_file() and not (folder(target) / file.name).exists():
                    disk.rename(file, folder(target) / file.name)
            disk.sync_folder(folder(target))
