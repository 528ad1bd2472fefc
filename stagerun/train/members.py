"""The members of an ensemble on one rank: their snapshots and networks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import StageFinished
from stagerun.base.recipe import Ensemble, Stage
from stagerun.base.snapshots import SnapshotRef
from stagerun.engine.codec import decode
from stagerun.engine.evaluate import Classifier
from stagerun.engine.state import placed, restore
from stagerun.models import build
from stagerun.train.agreement import hand_out, rank0
from stagerun.train.context import Context
from stagerun.train.progress import WEIGHTS
from stagerun.train.stage_loop import normalise_for


class StopRequested(Exception):
    """A stop during a pass over images, on all ranks."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A member on rank 0: its verified snapshot, and its result if it ends a stage."""

    ref: SnapshotRef
    result: StageFinished | None = None


@dataclass(frozen=True, slots=True)
class EnsembleRun:
    """An ensemble to run next, on one worker. `trained`: rank 0's, in the order of the members. `start_of`: the stage that it is
    averaged for; '' for its evaluation."""

    worker: Context
    ensemble: Ensemble
    trained: Sequence[Trained] = ()
    start_of: str = ""

    @property
    def stages(self) -> list[Stage]:
        return [self.worker.schedule.stage(name) for name, _ in self.ensemble.points]

    @property
    def begins_at(self) -> tuple[str, int]:
        """Stage and iteration of the member that is trained last."""
        running = [stage.name for stage in self.worker.schedule.stages]
        ends = [
            (stage.name, stage.solver.max_iter if iter is None else iter)
            for stage, (_, iter) in zip(self.stages, self.ensemble.points, strict=True)
        ]
        return max(ends, key=lambda end: (running.index(end[0]), end[1]))

    def network(self, stage: Stage) -> nn.Module:
        """Return the stage's freshly drawn network on the device, not compiled: one evaluation is too short."""
        torch.manual_seed(stage.solver.random_seed)
        return placed(build(stage.model), stage.solver, self.worker.device)

    def member(self, number: int) -> Classifier:
        """Return a network with its trained weights, the same on every rank. Collective."""
        stage = self.stages[number]
        model = self.network(stage)

        def fill() -> None:
            trained = self.trained[number]
            with of_this_network(trained):
                restore(dict(model.state_dict()), self.weights(trained))

        self.share(model, fill)
        return self.classifier(model, stage)

    def share(self, model: nn.Module, fill: Callable[[], None]) -> None:
        """Fill the network on rank 0, and copy the weights to the other ranks. Collective."""
        rank0(self.worker.comm, fill)
        hand_out(self.worker.comm, model.state_dict().values())

    def classifier(self, model: nn.Module, stage: Stage) -> Classifier:
        normalise = normalise_for(stage, stage.solver.test_transform, self.worker.device)
        return Classifier(model, normalise, stage.solver.precision)

    def weights(self, trained: Trained) -> dict[str, Tensor]:
        """Read the weights, on rank 0, so that it holds one member at a time. ResumeRefused for a snapshot damaged since it was
        verified; ValueError."""
        ref = trained.ref
        files = self.worker.rank0_keeper.read(ref)
        if files is None:
            raise ResumeRefused(
                f"snapshot {ref.name} was damaged meanwhile", "run the same command again to retrain it"
            )
        return decode(files.get(WEIGHTS, b""))


@contextmanager
def of_this_network(trained: Trained) -> Iterator[None]:
    """Turn a ValueError into ResumeRefused: the snapshot is of another network."""
    try:
        yield
    except ValueError as error:
        raise ResumeRefused(
            f"snapshot {trained.ref.name} does not fit the network of the schedule: {error}",
            "it was made by another model or stagerun; take another --out to start again",
        ) from error
