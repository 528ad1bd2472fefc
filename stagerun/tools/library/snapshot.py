"""`stagerun.Snapshot`: one saved state, and its network."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import store
from stagerun.base.errors import ResumeRefused
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef
from stagerun.language.stored import read_foreign
from stagerun.tools.library.plan import Folder
from stagerun.train.progress import MOST_RECIPE, RECIPE

if TYPE_CHECKING:
    from torch import nn


class Snapshot:
    """A snapshot's folder, OUT/snapshots/NAME. Made, it has read and verified the recipe; the tensors are read by `model`."""

    def __init__(self, path: Folder) -> None:
        """UsageError for what is not a snapshot; Damaged, ResumeRefused, StorageError, PermissionDenied."""
        from stagerun.tools.weights.selection import choose_snapshot

        self.path: Path = choose_snapshot(os.fspath(path), None)
        self._ref, text = store.read_file(store.LocalDisk(), self.path, RECIPE, MOST_RECIPE)
        try:
            self._recipe = read_foreign(text.decode())
            self._recipe.stage(self._ref.stage)
        except (KeyError, ValueError) as error:
            raise ResumeRefused(f"the recipe in snapshot {self.name} can't be read: {error}") from error

    @property
    def ref(self) -> SnapshotRef:
        """All that is known without the tensors: id, parent, identity, environment."""
        return self._ref

    @property
    def name(self) -> str:
        return self._ref.name

    @property
    def stage(self) -> str:
        return self._ref.stage

    @property
    def iter(self) -> int:
        """Updates done of its stage."""
        return self._ref.iter

    @property
    def recipe(self) -> Schedule:
        """The schedule that it was made from; `recipe.stage(snapshot.stage)` is its stage."""
        return self._recipe

    def model(self, ema: bool = False, device: str = "cpu", trust_code: bool = False) -> "nn.Module":
        """The network with its weights, in evaluation mode, in the precision that it was trained in. A new one each time.

        It takes images as `stagerun export` says, and returns logits. `ema`: the averaged weights, where the stage has `ema_decay`.
        `trust_code`: runs the Python that makes the network, as the snapshot has it; UsageError for such a network without.
        """
        import torch

        from stagerun.tools.weights.stored import Trust, load_network, open_snapshot

        with torch.random.fork_rng(devices=[]):  # weights are drawn before they are read
            return load_network(open_snapshot(self.path, Trust(trust_code)), torch.device(device), ema)

    def __repr__(self) -> str:
        return f"<Snapshot {self.name} of {self._recipe.name}: stage {self.stage} after {self.iter} iterations>"
