"""A snapshot on its own, without the schedule's folder: its recipe, its network and its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from stagerun import store
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import CODE as CODE_FIELDS
from stagerun.base.recipe import FILES, Model, Schedule, Stage
from stagerun.base.text import listed, size
from stagerun.engine.codec import decode
from stagerun.engine.state import placed, restore
from stagerun.language.code import reserved_name
from stagerun.language.consent import require_consent
from stagerun.language.networks import from_outside
from stagerun.language.stored import read_foreign
from stagerun.models import build
from stagerun.system.host import available_memory
from stagerun.system.typed import json_object
from stagerun.train.progress import AVERAGE, CODE, MOST_CODE, MOST_RECIPE, RECIPE, WEIGHTS
from stagerun.train.snapshot_sizes import SLACK, elements, most_bytes

_NARROWEST = 2  # bytes of a number in a tensor, less than any precision takes


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot's verified files, and the recipe among them. `stage` is the one it belongs to."""

    ref: store.SnapshotRef
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
    ref, text = store.read_file(disk, folder, RECIPE, MOST_RECIPE)
    try:
        schedule = read_foreign(text.decode())
        stage = _with_code(disk, folder, ref, schedule.stage(ref.stage), trust)
        most = _most_bytes(folder.name, stage.model)
        ref, files = store.read_folder(disk, folder, most)
        numbers, held = elements(stage.model), len(files[WEIGHTS])
        if held < _NARROWEST * numbers:  # the network need not be built to see that
            lacks = f"its weights have {held} bytes, and the network has {numbers} numbers"
            raise ResumeRefused(
                f"snapshot {ref.name} does not fit network `{stage.model.name}`: {lacks}", "no run has written that"
            )
        known = {field: ref.identity[field] for field in FILES & ref.identity.keys()}
        stage = replace(stage, identity={**stage.identity, **known})
        return Stored(ref, files, schedule, stage)
    except (KeyError, ValueError) as error:
        version = ref.environment.get("stagerun", "another version")
        raise ResumeRefused(
            f"the recipe in snapshot {ref.name} can't be read: {error}",
            f"it was written by stagerun {version}: use that one",
        ) from error


def _most_bytes(name: str, model: Model) -> Mapping[str, int]:
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


def _with_code(disk: store.LocalDisk, folder: Path, ref: store.SnapshotRef, stage: Stage, trust: Trust) -> Stage:
    """The stage with the Python that makes its network, where it has any."""
    if not from_outside(stage.model):
        return stage
    sources = sources_in(disk, folder) if trust.given and trust.schedule is None else None
    if trust.schedule is not None:
        if not trust.given:
            _require_same_code(ref, stage.model, trust.schedule.stage(trust.stage))
        sources = trust.schedule.python
    trusted = replace(stage.model, sources=sources)
    require_consent(trusted, f"snapshot {folder.name}")
    return replace(stage, model=trusted)


def _require_same_code(ref: store.SnapshotRef, model: Model, now: Stage) -> None:
    """UsageError unless the schedule makes its stage's network as the snapshot's recipe says: by that function, of those files."""
    was = {key: text for key, text in ref.identity.items() if key.startswith(CODE_FIELDS)}
    own = {key: text for key, text in now.identity.items() if key.startswith(CODE_FIELDS)}
    other = [key.removeprefix(CODE_FIELDS) for key in {**was, **own} if was.get(key) != own.get(key)]
    if (model.name, model.args) != (now.model.name, now.model.args):
        other.insert(0, f"`{now.model.name}`")
    if other:
        raise UsageError(
            f"snapshot {ref.name} was trained with other code than the schedule names now: {listed(other)}",
            "--trust-code takes the schedule's files as they are; the snapshot itself with --trust-code runs its own copy",
        )


def sources_in(disk: store.LocalDisk, folder: Path) -> Sources:
    """The Python that the snapshot in a folder holds. ValueError if no run has written it."""
    has_code = CODE in store.inspect_folder(disk, folder).files
    found = json_object(store.read_file(disk, folder, CODE, MOST_CODE)[1]) if has_code else {}
    for path, text in found.items():
        if not isinstance(text, str):
            raise ValueError(f"{CODE}: {path[:40]!a} is not a text")
        code_of(f"{path}:name")
        if reserved_name(path):
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
    saved = saved_weights(stored, ema)
    model = placed(build(stored.stage.model), stored.stage.solver, device)
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
