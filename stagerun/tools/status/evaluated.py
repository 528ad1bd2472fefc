"""What was evaluated last, of each stage and ensemble: by the log and the results in an output folder, which is not changed."""

from dataclasses import dataclass
from pathlib import Path

from stagerun.base.events import EnsembleTested, StageFinished, Tested, TestedBeside
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.language.build import completed
from stagerun.logs.log_file import LOG, Life, earlier_tests
from stagerun.plan import Plan
from stagerun.plan.ensembles import EnsembleState
from stagerun.train.results import planned_ensembles, read_ensemble, read_result


@dataclass(frozen=True, slots=True)
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
    beside: tuple[tuple[str, float, float, float | None, bool], ...] = ()  # as of StageFinished


def evaluations(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[Evaluation, ...]:
    """In the order of the schedule, as far as that is known: of a stage in training the last one inside it, of one that is done
    its end's, of another the newest there is."""
    order = [s.stage.name for s in plan.stages] if plan else life.run.stages if life.run else ()
    ends = {s.stage.name: s.end for s in plan.stages if s.end is not None} if plan else {}
    inside = _inside(out, life)
    found = []
    for stage in dict.fromkeys([*order, *(ref.stage for ref in inventory.snapshots)]):
        if stage in inside:
            found.append(_evaluation(inside[stage], life))
            continue
        newest = sorted(inventory.of(stage), key=lambda ref: (ref.attempt, ref.serial, ref.iter), reverse=True)
        results = (read_result(out, ref) for ref in ([ends[stage]] if stage in ends else newest))
        if (done := next(filter(None, results), None)) is not None:
            scores = (done.top1, done.top5, done.test_loss, done.ema_top1, done.ema_top5, done.ema_test_loss)
            found.append(Evaluation(done.stage, done.iterations, *scores, done.snapshot, done.beside))
    return tuple(found)


def _inside(out: Path, life: Life) -> dict[str, list[Tested]]:
    """By stage, the newest evaluation that no StageFinished has followed: of the trained weights and of the averaged ones."""
    found: dict[str, list[Tested]] = {}
    if life.stage is not None and life.stage.iter > life.stage.begins:  # in the lives before
        found[life.stage.stage] = earlier_tests(out / LOG, life.stage.stage)
    for event in life.of(Tested, StageFinished):
        if isinstance(event, StageFinished):
            found.pop(event.stage, None)
        else:
            found.setdefault(event.stage, []).append(event)
    return {stage: [t for t in tests if t.iter == tests[-1].iter] for stage, tests in found.items() if tests}


def _evaluation(tests: list[Tested], life: Life) -> Evaluation:
    stage, iter = tests[0].stage, tests[0].iter
    figures = {f"{'ema_' * t.ema}{name}": getattr(t, name) for t in tests for name in ("top1", "top5", "loss")}
    others = [t for t in life.of(TestedBeside) if (t.stage, t.iter) == (stage, iter)]
    beside = tuple((t.val, t.top1, t.top5, t.loss, t.ema) for t in others)
    return Evaluation(stage=stage, iter=iter, beside=beside, **figures)


def ensembles(out: Path, plan: Plan | None, life: Life, inventory: Inventory) -> tuple[EnsembleTested, ...]:
    """In the order of the schedule, as far as that is known. Where the schedule waits for members, an older evaluation stands as
    those of its members do, unless they have become something else."""
    if plan is None:
        found = [ensemble_on_disk(out, name, inventory) for name in (life.run.ensembles if life.run else ())]
    else:
        found = [
            ensemble_on_disk(out, e.ensemble.name, inventory) if e.state is EnsembleState.WAITING else e.result
            for e in planned_ensembles(plan, out)
        ]
    return tuple(tested for tested in found if tested is not None)


def ensemble_on_disk(out: Path, name: str, inventory: Inventory) -> EnsembleTested | None:
    """What was evaluated under that name, if all that it was made from is there, and no member was trained to something else
    after it. What the schedule means now a plan knows (`results.planned_ensembles`)."""
    tested = read_ensemble(out, name)
    if tested is None:
        return None
    members = [ref for ref in inventory.snapshots if ref.id in tested.snapshots]
    # An older version did not say when it was evaluated; no earlier than its members were trained.
    evaluated = max([(tested.attempt, tested.serial), *((ref.attempt, ref.serial) for ref in members)])

    def replaced(member: SnapshotRef) -> bool:
        later = [ref for ref in inventory.of(member.stage) if (ref.attempt, ref.serial) > evaluated]
        return any(_definition(ref) != _definition(member) for ref in later)

    whole = {ref.id for ref in members} >= set(tested.snapshots)
    return tested if whole and not any(map(replaced, members)) else None


def _definition(ref: SnapshotRef) -> tuple[str, dict[str, str]]:
    """What is the same for all snapshots of a stage that was trained once, those of its pieces too."""
    return ref.parent, completed(ref.identity)
