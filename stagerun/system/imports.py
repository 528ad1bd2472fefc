"""Where the LMDB of a `source` lies that is a folder of class folders: below `scratch`, or below OUT/data, under a name that says which state
of which folder it is. Nothing is made here; `data.importing.first_use` does that."""

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
REPORT = "stagerun-import.txt"  # of an import, beside its records
COPY = "stagerun-copy.json"  # in scratch, of what is or will be a copy: what `data.scratch` knows it by


def scratch_home(scratch: str) -> Path:
    """The folder in a `scratch` folder that is this user's."""
    return Path(scratch) / f"stagerun-{os.getuid()}"


def with_imports(schedule: "Schedule", out: str | os.PathLike[str]) -> "Schedule":
    """The schedule with an `Import` for each `source` that is a folder of class folders on this machine. One that can't be used has none:
    `language.look_at_folders` says why. Those that the schedule has already stay."""
    found: dict[str, Import] = {}
    for source in schedule.sources:
        if source.path not in schedule.imports and is_class_folder(source.path):
            with suppress(StagerunError):
                found[source.path] = import_of(small(source.path), schedule.data.scratch, out)
    return replace(schedule, imports={**schedule.imports, **found}) if found else schedule


def import_of(found: Listed, scratch: str | None, out: str | os.PathLike[str]) -> Import:
    """What the images become, in `scratch` or, without one, in the output folder `out`."""
    state = seen(found)
    real = os.path.realpath(found.root)
    if scratch is not None:  # as copies are named
        named = hashlib.sha256(f"import\0{real}\0{state.state}".encode(errors="surrogateescape")).hexdigest()
        lmdb = scratch_home(scratch) / named
    else:
        folder = hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:8]
        place = Path(os.path.abspath(out)) / FOLDER
        place = place.resolve() if place.is_symlink() else place  # of a stage that is trained beside others
        lmdb = place / f"{os.path.basename(real)}-{folder}-{state.state[:16]}"
    return Import(
        lmdb=str(lmdb),
        in_scratch=scratch is not None,
        classes=found.classes,
        counts=found.counts,
        files=state.files,
        state=state.state,
        bytes=state.bytes,
    )


def is_there(made: Import) -> bool:
    """Whether it was imported: the folder gets its name when it is complete."""
    return os.path.exists(os.path.join(made.lmdb, "data.mdb"))
