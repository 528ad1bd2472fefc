"""What `status` says of what was evaluated: of stages and of ensembles, as the schedule means them where it is at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.cli.log_tail import Life, earlier_tests, newest_start, started
from stagerun.cli.looking import LOG, ensemble_on_disk, last_result
from stagerun.events import EnsembleTested, StageFinished, Tested
from stagerun.plan import Plan
from stagerun.plan.ensembles import EnsembleState
from stagerun.snapshots import Inventory
from stagerun.train.results import planned_ensembles, read_result


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The last one of a stage. `snapshot` is '' for one inside a stage."""

    stage: str
    iter: int
    top1: float | None = None
    top5: float | None = None
    loss: float | None = None
    ema_top1: float | None = None
    ema_top5: float | None = None
    ema_loss: float | None = None
    snapshot: str = ""


def evaluations(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[Evaluation, ...]:
    """In the order of the schedule, as far as that is known: of a stage in training the last one inside it, of one that is done
    its end's, of another the newest there is."""
    run = started(life)
    order = [s.stage.name for s in plan.stages] if plan else list(run.stages) if run else []
    ends = {s.stage.name: s.end for s in plan.stages} if plan else {}
    inside = _inside(out, life)
    found = []
    for stage in dict.fromkeys([*order, *(ref.stage for ref in inventory.snapshots)]):
        end = ends.get(stage)
        if stage in inside:
            found.append(_evaluation(inside[stage]))
        elif end is not None:
            found += [_of_result(result)] if (result := read_result(out, end)) is not None else []
        elif (last := last_result(out, inventory.of(stage))) is not None:
            found.append(_of_result(last[1]))
    return tuple(found)


def ensembles(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[EnsembleTested, ...]:
    """In the order of the schedule, as far as that is known. Where the schedule waits for members, an older evaluation stands as
    those of its members do, unless they have become something else."""
    if plan is None:
        run = started(life)
        found = [ensemble_on_disk(out, name, inventory) for name in (run.ensembles if run else ())]
    else:
        found = [
            ensemble_on_disk(out, e.ensemble.name, inventory) if e.state is EnsembleState.WAITING else e.result
            for e in planned_ensembles(plan, out)
        ]
    return tuple(tested for tested in found if tested is not None)


def _inside(out: Path, life: Life) -> dict[str, list[Tested]]:
    """By stage, the newest evaluation that no StageFinished has followed: of the trained weights and of the averaged ones."""
    found: dict[str, list[Tested]] = {}
    start = newest_start(life)
    if start is not None and start.iter > 0:  # in the lives before
        found[start.stage] = earlier_tests(out / LOG, start.stage)
    for event in life.of(Tested, StageFinished):
        if isinstance(event, StageFinished):
            found.pop(event.stage, None)
        else:
            found.setdefault(event.stage, []).append(event)
    return {stage: [t for t in tests if t.iter == tests[-1].iter] for stage, tests in found.items() if tests}


def _evaluation(tests: Sequence[Tested]) -> Evaluation:
    figures = {f"{'ema_' * t.ema}{name}": getattr(t, name) for t in tests for name in ("top1", "top5", "loss")}
    return Evaluation(stage=tests[0].stage, iter=tests[0].iter, **figures)


def _of_result(result: StageFinished) -> Evaluation:
    return Evaluation(
        stage=result.stage,
        iter=result.iterations,
        top1=result.top1,
        top5=result.top5,
        loss=result.test_loss,
        ema_top1=result.ema_top1,
        ema_top5=result.ema_top5,
        ema_loss=result.ema_test_loss,
        snapshot=result.snapshot,
    )
