"""The average of the weights of an ensemble's members, with recomputed BatchNorm statistics."""

from collections.abc import Generator
from dataclasses import replace

from torch import nn

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import Event, Note, Stopped
from stagerun.comm import runs_of
from stagerun.engine import parameters, state
from stagerun.engine.averages import BatchStatistics
from stagerun.engine.codec import encode
from stagerun.engine.evaluate import Classifier, WeightMean, take_statistics
from stagerun.engine.images import feed
from stagerun.schedule.policies import average_weights
from stagerun.system.pulse import Section, beating
from stagerun.train.context import StageRun
from stagerun.train.members import EnsembleRun, StopRequested, Trained, of_this_network
from stagerun.train.progress import WEIGHTS
from stagerun.train.stage_loop import arithmetic_of


def averaged_start(run: StageRun) -> Generator[Event, None, dict[str, bytes] | None]:
    """Return the starting files of a stage that starts from an average, on rank 0; empty on the others. Collective; None after a
    Stopped, whose work is lost."""
    worker, name = run.worker, run.stage.average
    assert name is not None
    trained = [Trained(ref) for ref in run.planned.averaged]
    try:
        average = yield from average_of(EnsembleRun(worker, worker.schedule.ensemble(name), trained, run.stage.name))
    except StopRequested:
        reason = f"asked to stop; ensemble `{name}` is averaged later"
        yield Stopped(stage=run.stage.name, iter=run.planned.iter, reason=reason)
        return None
    return {WEIGHTS: encode(average.model.state_dict())} if worker.comm.rank == 0 else {}


def average_of(run: EnsembleRun) -> Generator[Event, None, Classifier]:
    """Return the network with the mean of the weights of its members, and recomputed BatchNorm statistics, the same on every rank.
    Collective. It computes as the first member does."""
    ensemble, stage = run.ensemble, run.stages[0]
    model = run.network(stage)
    statistics = BatchStatistics(model, parameters.frozen_norms(model, stage.solver.freeze))

    def fill() -> None:
        if len(run.trained) < len(ensemble.members):
            raise ResumeRefused(f"not all snapshots that ensemble `{ensemble.name}` is averaged from exist")
        mean, iters = WeightMean(model), sorted(trained.ref.iter for trained in run.trained)
        shares = average_weights(ensemble.shape, iters)
        for trained in run.trained:
            with of_this_network(trained):
                share = None if ensemble.shape is None else shares[iters.index(trained.ref.iter)]
                mean.add(run.weights(trained), share)
        with of_this_network(run.trained[0]):
            state.restore(dict(model.state_dict()), mean.mean())

    run.share(model, fill)
    if statistics.layers:
        images = ensemble.batch_norm_iter * stage.solver.batch_size
        what = f"stage {run.start_of} starts from " if run.start_of else ""
        text = f"{what}ensemble {ensemble.name}: BatchNorm statistics of the averaged network, over {images} images"
        yield Note(text=text)
        if not _take_statistics(run, statistics):
            raise StopRequested
    return run.classifier(model, stage)


def keep(run: EnsembleRun, model: nn.Module) -> None:
    """Save the averaged network on rank 0, for `eval`, `predict` and `export`."""
    worker, stage = run.worker, run.stages[0]
    iter = max(trained.ref.iter for trained in run.trained if trained.ref.stage == stage.name)
    weights = encode(model.state_dict())
    worker.rank0_keeper.commit_average(run.ensemble.name, stage, iter, weights, worker.environment(stage))


def _take_statistics(run: EnsembleRun, statistics: BatchStatistics) -> bool:
    """Pass over the training images of the first member, from the start of its epoch 0, at its final size. False if asked to stop."""
    iterations, worker, comm = run.ensemble.batch_norm_iter, run.worker, run.worker.comm
    solver = run.stages[0].solver
    solver = replace(solver, transform=replace(solver.transform, crop_size_ramp=None))
    stage = replace(run.stages[0], solver=solver)
    logical = runs_of(solver.logical_workers, comm.size)[comm.rank]
    without_loss = replace(stage, solver=replace(solver, loss=None))
    how = replace(arithmetic_of(without_loss, worker.device), clip_gradients=None)
    size = solver.device_batch_size
    requests = ((i * solver.batch_size + n * size, size) for i in range(iterations) for n in logical)
    loader = worker.images.loader(stage)
    with (
        comm.pulse.section(Section.EVALUATION),
        loader.stream(requests) as batches,
        feed(batches, worker.device) as fed,
    ):
        return take_statistics(statistics, beating(fed, comm.pulse), iterations, logical, how, comm, worker.stop)
