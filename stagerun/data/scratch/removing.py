"""Removing copies that stagerun made and no one uses."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from stagerun.data.scratch.layout import Found, home_of, survey, writing
from stagerun.data.scratch.locks import held
from stagerun.data.scratch.room import drop, idle_now


@dataclass(frozen=True, slots=True)
class Removal:
    """A copy that was removed, or why it was not."""

    copy: Found
    kept: str = ""  # "is in use"; '' if it was removed


def unstage(scratch: str, sources: Collection[str] | None, dry_run: bool = False) -> list[Removal]:
    """Removes the copies of the LMDBs in folders `sources`, old states and interrupted copies too; None: all of this user's.

    With `dry_run` it only says what would be. The sources need not exist any more. StorageError, PermissionDenied.
    """
    with writing(scratch):
        home = home_of(scratch, make=False)
        if not home.is_dir():
            return []
        with held(home / "lock", lambda: False):
            return [_remove(one, dry_run) for one in _of(home, sources)]


def copies_of(scratch: str, source: str) -> list[Found]:
    """Complete copies of the LMDB that is, or was, in folder `source`, longest unused first. StorageError, PermissionDenied."""
    with writing(scratch):
        return [one for one in _of(home_of(scratch, make=False), [source]) if not one.partial]


def _of(home: Path, sources: Collection[str] | None) -> list[Found]:
    if sources is None:
        return survey(home)
    # data.mdb itself may be a link, and a manifest has the folder that it leads to.
    wanted = {os.path.dirname(os.path.realpath(os.path.join(source, "data.mdb"))) for source in sources}
    return [one for one in survey(home) if one.manifest.source in wanted]


def _remove(one: Found, dry_run: bool) -> Removal:
    with idle_now(one) as kept:
        if not kept and not dry_run:
            drop(one)
        return Removal(one, kept)
