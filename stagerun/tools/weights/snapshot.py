"""A snapshot without the schedule's folder: its files, its recipe and its network. It may come from anyone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stagerun import store
from stagerun.base import recipe
from stagerun.base.errors import ResumeRefused, UsageError, listing
from stagerun.base.text import size
from stagerun.command.ending import tell
from stagerun.engine.codec import decode
from stagerun.engine.state import placed, restore
from stagerun.language.consent import asked, require_consent
from stagerun.language.stored import read_foreign
from stagerun.models import build
from stagerun.system.host import available_memory
from stagerun.system.image_sets import with_imports
from stagerun.tools.output import DISK, sources_in
from stagerun.tools.weights import SETS, Chosen
from stagerun.train.progress import (
    AVERAGE,
    MOST_RECIPE,
    RECIPE,
    SLACK,
    WEIGHTS,
    elements,
    most_bytes,
)

_NARROWEST = 2  # bytes of a number in a tensor, at least


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot's verified files, the schedule in its recipe, and the stage that it belongs to."""

    ref: store.SnapshotRef
    files: Mapping[str, bytes]
    schedule: recipe.Schedule
    stage: recipe.Stage


def open_snapshot(
    folder: Path, trust_code: bool = False, schedule: recipe.Schedule | None = None, stage: str = ""
) -> Stored:
    """Read the snapshot in a folder. The recipe comes first: it says how large the other files may be.

    Python that the recipe names runs with `trust_code`: the snapshot's copy, or the files of `schedule`. These run without it, too, if the
    snapshot was trained with the same. Damaged, ResumeRefused, StorageError, PermissionDenied; UsageError for code that isn't trusted.
    """
    ref, content = store.read_file(DISK, folder, RECIPE, MOST_RECIPE)
    try:
        held = read_foreign(content.decode())
        trained = held.stage(ref.stage)
        if any(asked(trained.model)):
            sources = None
            if schedule is not None:
                if not trust_code:
                    _require_same_code(ref, trained.model, schedule.stage(stage))
                sources = schedule.python
            elif trust_code:
                sources = sources_in(folder)
            trained = replace(trained, model=replace(trained.model, sources=sources))
            require_consent(trained.model, f"snapshot {folder.name}")
        ref, files = store.read_folder(DISK, folder, _most_bytes(folder.name, trained.model))
        if len(files[WEIGHTS]) < _NARROWEST * elements(trained.model):  # seen without building the network
            text = f"snapshot {ref.name} does not fit network `{trained.model.name}`: its weights have too few bytes"
            raise ResumeRefused(text, "no run has written that")
        digests = {field: ref.identity[field] for field in recipe.FILES & ref.identity.keys()}
        return Stored(ref, files, held, replace(trained, identity={**trained.identity, **digests}))
    except (KeyError, ValueError) as error:
        version = ref.environment.get("stagerun", "another version")
        hint = f"it was written by stagerun {version}: use that one"
        raise ResumeRefused(f"the recipe in snapshot {ref.name} can't be read: {error}", hint) from error


def open_chosen(
    chosen: Chosen, schedule: recipe.Schedule | None, trust_code: bool, images: bool = True
) -> list[Stored]:
    """Open snapshots, with the validation images and test transform of their schedule, if any. Without `images`
    their folders are not looked at. UsageError, Damaged and more as of `open_snapshot`."""
    opened = []
    for folder, stage in zip(chosen.folders, chosen.stages, strict=True):
        stored = open_snapshot(folder, trust_code, schedule, stage)
        if schedule is None:
            held = stored.schedule
            held = with_imports(held, folder.resolve().parent.parent) if images else held
            opened.append(replace(stored, schedule=held))
            continue
        now = schedule.stage(stage)  # which trains the same: else the snapshot would be stale
        if stored.stage.solver.test_transform != now.solver.test_transform:
            tell(f"note: {stage} is evaluated with the schedule's present transform, not the run's; {SETS}")
        opened.append(replace(stored, schedule=schedule, stage=replace(now, model=stored.stage.model)))
    return opened


def _most_bytes(name: str, model: recipe.Model) -> Mapping[str, int]:
    """Return `most_bytes` of the network that a recipe names. ResumeRefused if it can't be made, or needs more memory than is free: the
    recipe's author may mean harm."""
    try:
        most = most_bytes(model)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        text = f"the recipe in snapshot {name} names a network that can't be made: {type(error).__name__}: {error}"
        raise ResumeRefused(text, "it was made by another version of stagerun, or not by a run") from error
    needed, free = most[WEIGHTS] - SLACK, available_memory()
    if needed > free:
        text = f"the network in snapshot {name} may need {size(needed)} of memory, and {size(free)} are free here"
        raise ResumeRefused(text, "take a machine with more memory, if that network is meant")
    return most


def _require_same_code(ref: store.SnapshotRef, model: recipe.Model, now: recipe.Stage) -> None:
    """UsageError unless the schedule makes its stage's network by the function, and of the files, that the snapshot was trained with."""
    differing = ref.identity.items() ^ now.identity.items()
    changed = sorted({key.removeprefix(recipe.CODE) for key, _ in differing if key.startswith(recipe.CODE)})
    if (model.name, model.args) != (now.model.name, now.model.args):
        changed.insert(0, f"`{now.model.name}`")
    if changed:
        raise UsageError(
            f"snapshot {ref.name} was trained with other code than the schedule names now: {listing(changed, 'and')}",
            "--trust-code takes the schedule's files as they are; the snapshot itself with --trust-code runs its copy",
        )


def saved_weights(stored: Stored, ema: bool) -> dict[str, Tensor]:
    """Return parameters and buffers by name; with `ema` the averaged ones. ValueError; UsageError if nothing was averaged."""
    weights = decode(stored.files[WEIGHTS])
    if not ema:
        return weights
    if AVERAGE not in stored.files:
        hint = f"`ema_decay` of stage `{stored.ref.stage}` was not set when it was trained; leave --ema out"
        raise UsageError(f"snapshot {stored.ref.name} has no averaged weights", hint)
    # The count of BatchNorm's iterations isn't averaged.
    return weights | decode(stored.files[AVERAGE])


def load_network(stored: Stored, device: torch.device, ema: bool) -> nn.Module:
    """Return the network with its weights on `device`, in the precision and memory format of its training, for evaluation. ResumeRefused;
    UsageError as of `saved_weights`."""
    model = placed(build(stored.stage.model), stored.stage.solver, device)
    try:
        restore(dict(model.state_dict()), saved_weights(stored, ema))
    except (KeyError, ValueError) as error:
        version = stored.ref.environment.get("stagerun", "of another version")
        text = f"snapshot {stored.ref.name} does not fit network `{stored.stage.model.name}`: {error}"
        raise ResumeRefused(text, f"it was made by stagerun {version}: use that one") from error
    return model.eval()
