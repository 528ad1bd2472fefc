"""The end of a stage: its evaluation, and its line of the table of results."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from stagerun.base.events import Event, StageFinished, Stopped
from stagerun.base.units import epochs
from stagerun.engine.loop import all_skipped
from stagerun.engine.state import TrainState
from stagerun.plan.described import augmentation
from stagerun.plan.ensembles import tested_on, tested_set
from stagerun.schedule import make_knobs
from stagerun.system.pulse import Section
from stagerun.system.typed import read_as
from stagerun.train.agreement import rank0
from stagerun.train.context import StageRun
from stagerun.train.hooks import SetScore
from stagerun.train.hooks.evaluations import evaluate_state
from stagerun.train.results import write_result


def finish_stage(run: StageRun, state: TrainState, snapshot: str) -> Iterator[Event]:
    """Evaluate the trained stage, whose last snapshot is on disk, and write the result. Collective.

    `snapshot`: its name, on rank 0. Diverged for a stage that skipped every iteration.
    """
    scores: Sequence[SetScore] = ()

    def require_losses() -> None:
        if not run.losses:  # training has ended with Diverged, unless something else ended it right before
            raise all_skipped(run.stage.name, state.iter)

    rank0(run.worker.comm, require_losses)  # only rank 0 has the losses of previous lives
    if run.stage.data.val:
        evaluated = yield from evaluate_state(run, state, run.worker.final_test_iter)
        if evaluated is None:
            yield Stopped(stage=run.stage.name, iter=state.iter, reason="asked to stop")
            return
        scores = evaluated

    def written() -> dict[str, Any]:
        keeper, result = run.worker.rank0_keeper, _result(run, state, scores, snapshot)
        keeper.require_held()
        write_result(keeper.disk, keeper.out, result)
        return asdict(result)

    with run.worker.comm.pulse.section(Section.SAVE):
        result = read_as(StageFinished, rank0(run.worker.comm, written))
    yield result


def _result(run: StageRun, state: TrainState, scores: Sequence[SetScore], snapshot: str) -> StageFinished:
    """The line of the table."""
    stage, solver = run.stage, run.stage.solver
    iterations = state.iter - stage.begins
    first, last = make_knobs(solver)(stage.begins), make_knobs(solver)(state.iter - 1, state.plateau.drops)
    score = scores[0].score if scores else None
    ema = scores[1].score if len(scores) > 1 and scores[1].ema else None
    others = scores[1 if ema is None else 2 :]
    return StageFinished(
        stage=stage.name,
        iterations=state.iter,
        epochs=epochs(iterations, stage.data.train.images, solver.batch_size),
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
        train_seconds=run.seconds,
        images_per_second=iterations * solver.batch_size / run.seconds if run.seconds else 0.0,
        snapshot=snapshot,
        tested_on=tested_on(stage),
        tested_set=tested_set(run.worker.schedule, stage),
        skips=state.skips_in_all,
        rollbacks=state.rollbacks,
        beside=tuple((one.val, one.score.top1, one.score.top5, finite(one.score.loss), one.ema) for one in others),
        mean_ap=score.mean_ap if score else None,
        class_ap=score.class_ap if score else (),
        balanced_accuracy=score.balanced_accuracy if score else None,
        macro_f1=score.macro_f1 if score else None,
    )


def finite(loss: float) -> float | None:
    """Return None for a loss that is not finite, which JSON can't hold."""
    return loss if math.isfinite(loss) else None
