"""Where a stage ends: evaluation, inside the stage too, and the line of the table."""

import json
import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from stagerun.base.errors import StorageError
from stagerun.base.events import Event, StageFinished, Stopped, Tested, TestedBeside
from stagerun.base.recipe import Source, Stage
from stagerun.base.units import epochs
from stagerun.comm import runs_of
from stagerun.engine.evaluate import Score, evaluate
from stagerun.engine.feed import feed
from stagerun.engine.images import Batch
from stagerun.engine.loop import all_skipped
from stagerun.engine.losses import evaluation_loss
from stagerun.engine.state import TrainState
from stagerun.engine.update import explained
from stagerun.language.nets import ignored_in
from stagerun.plan.counting import tested_on, tested_set
from stagerun.plan.described import augmentation
from stagerun.schedule import make_knobs
from stagerun.store.logged import result_of
from stagerun.system.pulse import Section, beating
from stagerun.train.agreement import rank0
from stagerun.train.images import evaluated
from stagerun.train.results import write_result
from stagerun.train.stage_start import normalise_for
from stagerun.train.worker import Context, StageRun

Scores = list[
    tuple[str, Score, bool]
]  # validation set, score, and whether the averaged weights have it; the first set's come first


def test(run: StageRun, state: TrainState, test_iter: int | None) -> Generator[Event, None, Scores | None]:
    """Evaluate the trained weights and, where the stage has them, the averaged ones, on `test_iter` batches of each set or on all images.
    Collective. None if asked to stop."""
    if state.replicas is not None:
        state.replicas.show()
    found: Scores = []
    for val in run.stage.data.val:
        for ema in (False,) if state.average is None else (False, True):
            began = time.monotonic()
            score = _score(run, state, val, test_iter, ema)
            if score is None:
                return None
            found.append((val.name, score, ema))
            event = Tested if val is run.stage.data.val[0] else TestedBeside
            yield event(
                stage=run.stage.name,
                iter=state.iter,
                images=score.images,
                top1=score.top1,
                top5=score.top5,
                loss=score.loss,
                seconds=time.monotonic() - began,
                ema=ema,
                val=val.name,
                mean_ap=score.mean_ap,
            )
    return found


def _score(run: StageRun, state: TrainState, val: Source, test_iter: int | None, ema: bool) -> Score | None:
    worker, stage, solver = run.worker, run.stage, run.stage.solver
    # As in training; but where every batch has a shape of its own, torch.compile would take a minute for each and then give up.
    eager = solver.compile and solver.test_transform.rectangular
    with (
        explained(solver.test_batch_size, "test_batch_size"),
        state.average.in_place() if ema and state.average is not None else nullcontext(),
        torch.compiler.set_stance("force_eager") if eager else nullcontext(),
        evaluation(worker, stage, val, test_iter) as (batches, count),
    ):
        return evaluate(
            state.model,
            batches,
            count,
            normalise_for(stage.model, solver, solver.test_transform, worker.device, stage.identity),
            solver.precision,
            worker.comm,
            worker.stop,
            evaluation_loss(solver),
            ignored_in(stage),
        )


@contextmanager
def evaluation(
    worker: Context, stage: Stage, val: Source, test_iter: int | None
) -> Iterator[tuple[Iterator[tuple[int, Batch]], int]]:
    """This rank's batches of an evaluation with their numbers, and how many all ranks have."""
    loader, size, comm = worker.images.test_loader(stage, val), stage.solver.test_batch_size, worker.comm
    images = len(loader.records)
    numbers = evaluated(stage, -(-images // size), test_iter)
    mine = runs_of(len(numbers), comm.size)[comm.rank]
    asked = ((first, min(size, images - first)) for first in (numbers[n] * size for n in mine))
    with (
        comm.pulse.section(Section.EVALUATION),
        loader.stream(asked) as batches,
        feed(batches, worker.device) as fed,
    ):
        yield zip(mine, worker.images.labelled(beating(fed, comm.pulse), stage, val), strict=False), len(numbers)


def finish_stage(run: StageRun, state: TrainState) -> Iterator[Event]:
    """Evaluates the trained stage, whose last snapshot is on disk, and writes the result beside it. Collective.

    Diverged for a stage of which every iteration was skipped.
    """
    scores: Scores | None = None

    def require_losses() -> None:
        if not run.losses:  # training has ended with Diverged, unless something else ended it right before
            raise all_skipped(run.stage.name, state.iter)

    rank0(run.worker.comm, require_losses)  # it alone has those of lives before
    if run.stage.data.val:
        scores = yield from test(run, state, run.worker.final_test_iter)
        if scores is None:
            yield Stopped(stage=run.stage.name, iter=state.iter, reason="asked to stop")
            return
    yield _result(run, state, scores)


def _result(run: StageRun, state: TrainState, scores: Scores | None) -> StageFinished:
    """The line of the table, written to disk by rank 0, the same on every rank."""

    def result() -> dict[str, Any]:
        assert run.worker.keeper is not None
        solver = run.stage.solver
        first, last = make_knobs(solver)(run.stage.begins), make_knobs(solver)(state.iter - 1, state.plateau.drops)
        snapshot = _last_snapshot(run, state)
        seconds = run.seconds
        own = scores or []
        score = own[0][1] if own else None
        ema = own[1][1] if len(own) > 1 and own[1][2] else None
        finished = StageFinished(
            stage=run.stage.name,
            iterations=state.iter,
            epochs=epochs(state.iter - run.stage.begins, run.stage.data.train.images, solver.batch_size),
            first_lr=first.lr,
            last_lr=last.lr,
            weight_decay=first.weight_decay,
            augmentation=augmentation(solver),
            loss=sum(run.losses) / len(run.losses),
            top1=score.top1 if score else None,
            top5=score.top5 if score else None,
            test_loss=finite(score.loss) if score else None,
            ema_top1=ema.top1 if ema else None,
            ema_top5=ema.top5 if ema else None,
            ema_test_loss=finite(ema.loss) if ema else None,
            train_seconds=seconds,
            images_per_second=(state.iter - run.stage.begins) * solver.batch_size / seconds if seconds else 0.0,
            snapshot=snapshot,
            tested_on=tested_on(run.stage),
            tested_set=tested_set(run.worker.schedule, run.stage),
            skips=state.skips_in_all,
            rollbacks=state.rollbacks,
            beside=tuple(
                (name, s.top1, s.top5, finite(s.loss), averaged) for name, s, averaged in own[1 if ema is None else 2 :]
            ),
            mean_ap=score.mean_ap if score else None,
            class_ap=score.class_ap if score else (),
        )
        run.worker.keeper.require_held()
        write_result(run.worker.keeper.disk, run.worker.keeper.out, finished)
        return asdict(finished)

    with run.worker.comm.pulse.section(Section.SAVE):  # the folder is read, and written to
        return result_of(json.dumps(rank0(run.worker.comm, result)).encode())


def finite(loss: float) -> float | None:
    """None for a loss that is not a finite number, which JSON can't hold and finite weights can give."""
    return loss if math.isfinite(loss) else None


def _last_snapshot(run: StageRun, state: TrainState) -> str:
    assert run.worker.keeper is not None
    if run.planned.end is not None:
        return run.planned.end.name
    own = [ref for ref in run.worker.keeper.inventory().of(run.stage.name) if ref.iter == state.iter]
    if not own:  # it was there when the stage ended
        raise StorageError(
            f"the last snapshot of stage `{run.stage.name}` can't be read any more",
            "see the system's log (dmesg); the same command goes on from what can be read",
        )
    return max(own, key=lambda ref: ref.attempt).name
