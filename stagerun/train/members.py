"""The members of an ensemble on one rank: which snapshots they are, and their networks."""

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


class AskedToStop(Exception):
    """In the midst of a pass over images, on all ranks."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A member as rank 0 has it: the snapshot, which was verified, and how it does by itself, where its stage ends with it."""

    ref: SnapshotRef
    result: StageFinished | None = None


@dataclass(frozen=True, slots=True)
class EnsembleRun:
    """An ensemble that comes next, on one worker. `trained`, in the order of the members, is rank 0's. `start_of`: the stage that it is
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
        """The stage's network on the device, as it was drawn. Not compiled: one evaluation is not worth it."""
        torch.manual_seed(stage.solver.random_seed)
        return placed(build(stage.model), stage.solver, self.worker.device)

    def member(self, number: int) -> Classifier:
        """A network with its trained weights, the same on every rank. Collective."""
        stage = self.stages[number]
        model = self.network(stage)

        def fill() -> None:
            trained = self.trained[number]
            with of_this_network(trained):
                restore(dict(model.state_dict()), self.weights(trained))

        self.share(model, fill)
        return self.classifier(model, stage)

    def share(self, model: nn.Module, fill: Callable[[], None]) -> None:
        """Hand the weights that rank 0 fills the network with to the networks of all ranks. Collective."""
        rank0(self.worker.comm, fill)
        hand_out(self.worker.comm, model.state_dict().values())

    def classifier(self, model: nn.Module, stage: Stage) -> Classifier:
        normalise = normalise_for(stage, stage.solver.test_transform, self.worker.device)
        return Classifier(model, normalise, stage.solver.precision)

    def weights(self, trained: Trained) -> dict[str, Tensor]:
        """Read when it is its turn, so that rank 0 holds those of one member at a time. ResumeRefused for one damaged since it was verified;
        ValueError."""
        keeper, ref = self.worker.keeper, trained.ref
        assert keeper is not None
        files = keeper.read(ref)
        if files is None:
            text = f"snapshot {ref.name} was damaged meanwhile"
            raise ResumeRefused(text, "type the same command again: it is made anew")
        return decode(files.get(WEIGHTS, b""))


@contextmanager
def of_this_network(trained: Trained) -> Iterator[None]:
    """ResumeRefused for a ValueError inside: the snapshot is of another network."""
    try:
        yield
    except ValueError as error:
        raise ResumeRefused(
            f"snapshot {trained.ref.name} does not fit the network of the schedule: {error}",
            "it was made by another model or stagerun; take another --out to start anew",
        ) from error
