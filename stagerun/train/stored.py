"""A snapshot on its own: its recipe and its network, without the schedule's folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stagerun import store
from stagerun.engine.codec import decode
from stagerun.engine.device import dtype_of
from stagerun.engine.state import restore
from stagerun.errors import ResumeRefused, UsageError
from stagerun.models import build
from stagerun.recipe import Schedule, Stage
from stagerun.snapshots import SnapshotRef
from stagerun.spec.stored import read_foreign
from stagerun.train.bounds import require_buildable, require_large_enough
from stagerun.train.progress import AVERAGE, MOST_RECIPE, RECIPE, WEIGHTS


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot's verified files, and the recipe among them. `stage` is the one it belongs to."""

    ref: SnapshotRef
    files: Mapping[str, bytes]
    schedule: Schedule
    stage: Stage


def open_snapshot(folder: Path) -> Stored:
    """The snapshot in a folder, wherever it lies. Damaged, ResumeRefused, StorageError, PermissionDenied.

    It need not be ours: the recipe is read first, and tells how large the rest may be.
    """
    disk = store.LocalDisk()
    ref, text = store.read_file_of(disk, folder, RECIPE, MOST_RECIPE)
    try:
        schedule = read_foreign(text.decode())
        most = require_buildable(folder.name, schedule.model)
        ref, files = store.read_folder(disk, folder, most)
        require_large_enough(ref.name, schedule.model, files[WEIGHTS])
        return Stored(ref, files, schedule, schedule.stage(ref.stage))
    except (KeyError, ValueError) as error:
        version = ref.environment.get("stagerun", "another version")
        raise ResumeRefused(
            f"the recipe in snapshot {ref.name} can't be read: {error}",
            f"it was written by stagerun {version}: use that one",
        ) from error


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
    model = build(stored.schedule.model)
    model.to(device, dtype_of(solver.precision))
    if solver.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        restore(dict(model.state_dict()), saved)
    except ValueError as error:
        raise _does_not_fit(stored, error) from error
    return model.eval()


def _does_not_fit(stored: Stored, error: Exception) -> ResumeRefused:
    return ResumeRefused(
        f"snapshot {stored.ref.name} does not fit network `{stored.schedule.model.name}`: {error}",
        f"it was made by stagerun {stored.ref.environment.get('stagerun', 'of another version')}: use that one",
    )
