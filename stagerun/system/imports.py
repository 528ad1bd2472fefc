"""Paths of the LMDBs that class folders named by `source` are imported to: below `scratch`, or OUT/data, named by the folder and its state.
`data.importing.first_use` makes them."""

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun.base.errors import StagerunError
from stagerun.base.recipe import Import
from stagerun.system.image_folder import Listed, is_class_folder, seen, small

if TYPE_CHECKING:
    from stagerun.base.recipe import Schedule

FOLDER = "data"  # in OUT
REPORT = "stagerun-import.txt"  # of an import, in its LMDB's folder
COPY = "stagerun-copy.json"  # in scratch: identifies a finished or unfinished copy for `data.scratch`


def scratch_home(scratch: str) -> Path:
    """Return this user's folder in a `scratch` folder."""
    return Path(scratch) / f"stagerun-{os.getuid()}"


def with_imports(schedule: "Schedule", out: str | os.PathLike[str]) -> "Schedule":
    """Return the schedule with an `Import` for each `source` of class folders on this machine, except for unusable ones, which
    `language.look_at_folders` reports. Existing ones stay."""
    imports: dict[str, Import] = {}
    for source in schedule.sources:
        if source.path not in schedule.imports and is_class_folder(source.path):
            with suppress(StagerunError):
                imports[source.path] = import_of(small(source.path), schedule.data.scratch, out)
    return replace(schedule, imports={**schedule.imports, **imports}) if imports else schedule


def import_of(images: Listed, scratch: str | None, out: str | os.PathLike[str]) -> Import:
    """Return the import of these images into `scratch` or, without it, into the output folder `out`."""
    state = seen(images)
    real = os.path.realpath(images.root)
    if scratch is not None:  # named like copies
        named = hashlib.sha256(f"import\0{real}\0{state.state}".encode(errors="surrogateescape")).hexdigest()
        lmdb = scratch_home(scratch) / named
    else:
        folder = hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:8]
        parent = Path(os.path.abspath(out)) / FOLDER
        parent = parent.resolve() if parent.is_symlink() else parent  # a stage of parallel training
        lmdb = parent / f"{os.path.basename(real)}-{folder}-{state.state[:16]}"
    return Import(
        lmdb=str(lmdb),
        in_scratch=scratch is not None,
        classes=images.classes,
        counts=images.counts,
        files=state.files,
        state=state.state,
        bytes=state.bytes,
    )


def is_there(made: Import) -> bool:
    """Return whether the import is complete: only then the folder gets its name."""
    return os.path.exists(os.path.join(made.lmdb, "data.mdb"))
