"""A snapshot on its own, without the schedule's folder: its recipe, its network, and how large its files may be."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from stagerun import store
from stagerun.base import recipe
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import FILES, Schedule, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import listed, size
from stagerun.engine.codec import decode
from stagerun.engine.device import dtype_of
from stagerun.engine.state import restore, to_channels_last
from stagerun.language.code import is_reserved
from stagerun.language.consent import require_consent
from stagerun.language.networks import from_outside
from stagerun.language.stored import read_foreign
from stagerun.models import build
from stagerun.models.skeleton import without_memory
from stagerun.plan import PlannedStage, State
from stagerun.system.host import available_memory
from stagerun.system.typed import json_object
from stagerun.train.progress import (
    ARRIVALS,
    AVERAGE,
    CODE,
    MOMENTUM,
    MOST_CODE,
    MOST_RECIPE,
    MOST_STATE,
    RECIPE,
    REPLICAS,
    RESIDUAL,
    STATE,
    WEIGHTS,
)

# Bytes of a number in a tensor: precision FP64, and less than any. What a solver remembers of a parameter: two tensors at most (Adam's).
NARROWEST, WIDEST, SLOTS = 2, 8, 2
# Of a push in the record of each server: in which order it was claimed and applied, by whom, what it had seen, and how often it was refused.
PUSH = 64
# For names, and for what another version's network had more.
SLACK = 16_000_000


def most_bytes(model: recipe.Model, senders: int = 0, replicas: int = 0, pushes: int = 0) -> Mapping[str, int]:
    """Bytes by file, as `store.read` takes it: the most that the network, the residuals of `senders`, `replicas` and a record of
    `pushes` (`ASYNC`) can take; for 0 nothing is read. A sparse file of 100 GB is refused by its size, and a recipe of an endless network
    before it is built."""
    numbers = elements(model)
    tensors = WIDEST * numbers + SLACK
    return {
        WEIGHTS: tensors,
        AVERAGE: tensors,
        MOMENTUM: SLOTS * WIDEST * numbers + SLACK,
        RESIDUAL: (senders + 1) * tensors if senders else 0,
        # Of each its weights and what is remembered of them; and twice the weights for the outer update.
        REPLICAS: ((1 + SLOTS) * replicas + 2) * tensors if replicas else 0,
        ARRIVALS: PUSH * pushes + SLACK if pushes else 0,
        STATE: MOST_STATE,
        RECIPE: MOST_RECIPE,
        CODE: MOST_CODE,
    }


def most_for(schedule: Schedule, planned: PlannedStage) -> Mapping[str, int]:
    """`most_bytes` of what a stage goes on from: residuals, replicas and arrivals are read where it has a use for them. There is a residual
    per logical worker."""
    solver, resumes = planned.stage.solver, planned.state is State.RESUME
    fresh = planned.state is State.FRESH and planned.stage.parent is not None
    model = (schedule.stage(planned.stage.parent or "") if fresh else planned.stage).model
    senders = solver.logical_workers if solver.compress and resumes else 0
    replicas = solver.sync.replicas if resumes and solver.sync and not solver.asynchronous else 0
    return most_bytes(model, senders, replicas, planned.iter if resumes and solver.asynchronous else 0)


@lru_cache(maxsize=16)
def elements(model: recipe.Model) -> int:
    """Numbers in the parameters and buffers of a network, however large it is: it is made without memory for them."""
    return sum(tensor.numel() for tensor in without_memory(model).state_dict().values())


def require_buildable(name: str, model: recipe.Model) -> Mapping[str, int]:
    """`most_bytes` of the network that a snapshot's own recipe names. ResumeRefused for one that stagerun doesn't know, or that
    doesn't fit into the memory that is free: whoever wrote the recipe may have meant harm."""
    try:
        most = most_bytes(model)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise ResumeRefused(
            f"the recipe in snapshot {name} names a network that can't be made: {type(error).__name__}: {error}",
            "it was made by another version of stagerun, or not by a run",
        ) from error
    needed, free = most[WEIGHTS] - SLACK, available_memory()
    if needed > free:
        raise ResumeRefused(
            f"the network in snapshot {name} may need {size(needed)} of memory, and {size(free)} are free here",
            "take a machine with more memory, if that network is meant",
        )
    return most


def require_large_enough(name: str, model: recipe.Model, weights: bytes) -> None:
    """ResumeRefused if a file is too small to be the weights of a network, which then need not be built to see that they are not."""
    if len(weights) < NARROWEST * elements(model):
        raise ResumeRefused(
            f"snapshot {name} does not fit network `{model.name}`: its weights have {len(weights)} bytes, and the network has "
            f"{elements(model)} numbers",
            "no run has written that",
        )


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot's verified files, and the recipe among them. `stage` is the one it belongs to."""

    ref: SnapshotRef
    files: Mapping[str, bytes]
    schedule: Schedule
    stage: Stage


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether Python that a snapshot's recipe names may be run: that of a schedule's folder, or the copy that the snapshot has.

    Who names a `schedule` trusts its files: the network of its `stage` needs no word where the snapshot was trained with the same."""

    given: bool = False
    schedule: Schedule | None = None
    stage: str = ""


def open_snapshot(folder: Path, trust: Trust = Trust()) -> Stored:
    """The snapshot in a folder, wherever it lies. Damaged, ResumeRefused, StorageError, PermissionDenied; UsageError where its network is
    made by Python that isn't trusted.

    It need not be ours: the recipe is read first, and says how large the rest may be.
    """
    disk = store.LocalDisk()
    ref, text = store.read_file_of(disk, folder, RECIPE, MOST_RECIPE)
    try:
        schedule = read_foreign(text.decode())
        stage = _with_code(disk, folder, ref, schedule.stage(ref.stage), trust)
        most = require_buildable(folder.name, stage.model)
        ref, files = store.read_folder(disk, folder, most)
        require_large_enough(ref.name, stage.model, files[WEIGHTS])
        known = {field: ref.identity[field] for field in FILES & ref.identity.keys()}
        stage = replace(stage, identity={**stage.identity, **known})
        return Stored(ref, files, schedule, stage)
    except (KeyError, ValueError) as error:
        version = ref.environment.get("stagerun", "another version")
        raise ResumeRefused(
            f"the recipe in snapshot {ref.name} can't be read: {error}",
            f"it was written by stagerun {version}: use that one",
        ) from error


def _with_code(disk: store.LocalDisk, folder: Path, ref: SnapshotRef, stage: Stage, trust: Trust) -> Stage:
    """The stage with the Python that makes its network, where it has any."""
    if not from_outside(stage.model):
        return stage
    sources = None
    if trust.schedule is not None:
        if not trust.given:
            _require_same_code(ref, stage.model, trust.schedule.stage(trust.stage))
        sources = trust.schedule.python
    elif trust.given:
        sources = sources_in(disk, folder)
    trusted = replace(stage.model, sources=sources)
    require_consent(trusted, f"snapshot {folder.name}")
    return replace(stage, model=trusted)


def _require_same_code(ref: SnapshotRef, model: recipe.Model, now: Stage) -> None:
    """UsageError unless the schedule makes its stage's network as the snapshot's recipe says: by that function, of those files."""
    was = {key: text for key, text in ref.identity.items() if key.startswith(recipe.CODE)}
    own = {key: text for key, text in now.identity.items() if key.startswith(recipe.CODE)}
    other = [key.removeprefix(recipe.CODE) for key in {**was, **own} if was.get(key) != own.get(key)]
    if (model.name, model.args) != (now.model.name, now.model.args):
        other.insert(0, f"`{now.model.name}`")
    if other:
        raise UsageError(
            f"snapshot {ref.name} was trained with other code than the schedule names now: {listed(other)}",
            "--trust-code takes the schedule's files as they are; the snapshot itself with --trust-code runs its own copy",
        )


def sources_in(disk: store.LocalDisk, folder: Path) -> Sources:
    """The Python that the snapshot in a folder holds."""
    names = store.inspect_folder(disk, folder).files
    texts = store.read_file_of(disk, folder, CODE, MOST_CODE)[1] if CODE in names else b"{}"
    return sources_of(texts, folder)


def sources_of(texts: bytes, folder: Path) -> Sources:
    """What `code.json` holds. ValueError if no run has written it."""
    found = json_object(texts)
    for path, text in found.items():
        if not isinstance(text, str):
            raise ValueError(f"{CODE}: {path[:40]!a} is not a text")
        code_of(f"{path}:name")
        if is_reserved(path):
            raise ValueError(f"{CODE}: {path} has the name of a module of Python's or torch's")
    return Sources(str(folder / CODE), tuple((path, str(text)) for path, text in sorted(found.items())))


def saved_weights(stored: Stored, ema: bool) -> dict[str, Tensor]:
    """Parameters and buffers by name; with `ema` the averaged ones. UsageError if the snapshot has none of these."""
    try:
        weights = decode(stored.files[WEIGHTS])
        if not ema:
            return weights
        if AVERAGE not in stored.files:
            raise UsageError(
                f"snapshot {stored.ref.name} has no averaged weights",
                f"`ema_decay` of stage `{stored.ref.stage}` was not set when it was trained; leave --ema out",
            )
        # What isn't averaged (the count of BatchNorm's iterations) is the trained network's.
        return weights | decode(stored.files[AVERAGE])
    except (KeyError, ValueError) as error:
        raise _does_not_fit(stored, error) from error


def load_network(stored: Stored, device: torch.device, ema: bool) -> nn.Module:
    """The network with its weights, on `device`, in the precision and memory format it was trained in, for evaluation.

    Errors as of `saved_weights`; ResumeRefused if the weights are of another network.
    """
    solver = stored.stage.solver
    saved = saved_weights(stored, ema)
    model = build(stored.stage.model)
    model.to(device, dtype_of(solver.precision))
    if solver.channels_last:
        to_channels_last(model)
    try:
        restore(dict(model.state_dict()), saved)
    except ValueError as error:
        raise _does_not_fit(stored, error) from error
    return model.eval()


def _does_not_fit(stored: Stored, error: Exception) -> ResumeRefused:
    return ResumeRefused(
        f"snapshot {stored.ref.name} does not fit network `{stored.stage.model.name}`: {error}",
        f"it was made by stagerun {stored.ref.environment.get('stagerun', 'of another version')}: use that one",
    )
