"""The environment that a stage's bits depend on besides its definition, and the promise of a run when it resumes."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

import stagerun
from stagerun.base.errors import ResumeRefused
from stagerun.base.events import Note
from stagerun.base.recipe import IGNORED, Determinism, Ensemble, Schedule, Stage
from stagerun.base.snapshots import TRAINING_SET, SnapshotRef, same_set
from stagerun.base.text import listed
from stagerun.comm import Comm, gather_json, layout_of
from stagerun.data.transform import pixels_made_by
from stagerun.engine.augment import colours_made_by
from stagerun.engine.device import RECORDED_SINCE, differences, environment, flags_apart
from stagerun.plan import Plan, PlannedStage, State

Environment = Callable[[Stage], Mapping[str, str]]


def other_machines(comm: Comm, device: torch.device, determinism: Determinism) -> str:
    """Describe what other ranks compute with, if it differs from rank 0; '' if all are alike. Collective."""
    first, *others = gather_json(comm, _machine(device, comm.size, ""))
    ranks: dict[str, list[str]] = {}
    for rank, other in enumerate(others, 1):
        names = [
            name
            for name in sorted((other.keys() | first.keys()) - IGNORED[determinism])
            if other.get(name) != first.get(name)
        ]
        differing = {name: other.get(name, "none") for name in names}
        if "processor flags" in differing:
            differing["processor flags"] = flags_apart(first.get("processor flags", ""), differing["processor flags"])
        if differing:
            ranks.setdefault(", ".join(f"{name} {text}" for name, text in differing.items()), []).append(str(rank))
    return "; ".join(f"rank{'s' if len(who) > 1 else ''} {' '.join(who)}: {text}" for text, who in ranks.items())


def _machine(device: torch.device, workers: int, reducer: str) -> dict[str, str]:
    return environment(device, workers, reducer) | {"stagerun": stagerun.__version__, "image library": pixels_made_by()}


def environment_of(
    schedule: Schedule, stage: Stage, device: torch.device, workers: int, others: str = ""
) -> dict[str, str]:
    """Return what the stage's snapshots record, and what is compared with the snapshot that it resumes from. `others`: see `other_machines`."""
    bits = _machine(device, workers, layout_of(schedule.determinism, workers))
    if others:
        bits["other ranks"] = others
    if stage.data.train.path in schedule.sets:
        bits[TRAINING_SET] = schedule.sets[stage.data.train.path]
    if stage.solver.transform.changes_colours:
        bits["colour library"] = colours_made_by()
    if stage.solver.transform.python:  # another version's generator may draw other numbers
        bits["numpy"] = np.__version__
    return bits


def promise(schedule: Schedule, planned: PlannedStage, now: dict[str, str], replays: bool = False) -> Note | None:
    """Promise BIT-EXACT, or EQUIVALENT and why, on rank 0. For a new stage only an environment unlike its parent's is reported; for a
    finished one the promise is of its evaluation. Pushes of several workers (`method: ASYNC`) are exact only to a record (`replays`),
    with any number of workers."""
    piece, tested = planned.until is not None, planned.state is State.DONE
    before = planned.like if piece else planned.end if tested else planned.start
    if before is None or (tested and not planned.stage.data.val):
        return None
    pushes = planned.stage.solver.asynchronous and not tested and planned.state is not State.FRESH
    if pushes and replays:
        now = now | {name: before.environment[name] for name in ("workers", "reducer") if name in before.environment}
    other_images = planned.state is State.FRESH and not piece and schedule.changes_set(planned.stage)
    changed = _changed(schedule, before, now, evaluated=tested or other_images)
    what = f"{planned.label} again" if piece else f"the evaluation of {planned.stage.name}" if tested else "resume"
    like = f", before: {before.name}" if piece else ""
    if pushes and not replays and {now["workers"], before.environment.get("workers")} != {"1"}:
        text = "applies pushes in a new order: only a replay of its record (--replay) has the same bits"
        return Note(text=f"{what} {text}")
    if changed:
        return Note(text=f"{what} is EQUIVALENT, not BIT-EXACT{like}: " + "; ".join(changed), warning=True)
    if not piece and planned.state is State.FRESH:
        return None
    if now["device"] != "cpu":
        return Note(text=f"{what} with everything as before{like}; same bits on a GPU were not verified")
    same = before.environment.get("workers") == now["workers"] and not (pushes and replays)
    alike = "threads, workers and reducer" if same else "threads and reducer"
    images = ""
    if TRAINING_SET in now and not tested:
        whole = all("index " in bits[TRAINING_SET] for bits in (before.environment, now))
        images = ", training images" if whole else ", training images as far as 32 of them show"
    processor = "" if schedule.determinism is Determinism.PORTABLE else ", processor"
    return Note(text=f"{what} is BIT-EXACT{like}: same torch build{images}{processor}, instruction set, {alike}")


def promise_of_ensemble(
    schedule: Schedule, ensemble: Ensemble, members: Iterable[SnapshotRef], environment: Environment
) -> Note | None:
    """Report EQUIVALENT and why, if a member was trained in another environment than the ensemble is evaluated in."""
    changed: dict[str, None] = {}
    for (name, _), ref in zip(ensemble.points, members, strict=True):
        now = environment(schedule.stage(name))
        evaluated = not ensemble.averages  # else its statistics are of the training images
        changed |= dict.fromkeys(_changed(schedule, ref, now, evaluated))
    if not changed:
        return None
    text = f"ensemble {ensemble.name} is EQUIVALENT, not BIT-EXACT, to one without a stop: " + "; ".join(changed)
    return Note(text=text, warning=True)


def require_exact(promise: Note | None, portable: bool = False) -> None:
    """Raise ResumeRefused unless the `promise` of the next step is BIT-EXACT. `portable`: `determinism: PORTABLE` asks for it."""
    if promise is not None and (promise.warning or "is BIT-EXACT" not in promise.text):
        asked = "`determinism: PORTABLE`" if portable else "--require-bit-exact"
        without = "without the option training resumes here, equivalent but for rounding"
        if portable:
            without = "a schedule with ELASTIC starts again from its first stage"
        raise ResumeRefused(f"{asked}: {promise.text}", f"run in the same environment; {without}")


def require_same(plan: Plan, environment: Environment) -> None:
    """Raise ResumeRefused if the plan would retrain a missing snapshot in another environment, and finished stages started from it:
    they would become stale. Stages that --redo names may."""
    schedule, texts, names = plan.schedule, list[str](), dict[str, None]()
    for lost in plan.lost:
        if lost.like is None or not lost.unasked:
            continue
        now = environment(schedule.stage(lost.stage))
        # Unrecorded parts may be unchanged; if not, the next plan sees the other bits.
        unrecorded = (RECORDED_SINCE | {TRAINING_SET}) - lost.like.environment.keys()
        changed = _changed(schedule, lost.like, {name: value for name, value in now.items() if name not in unrecorded})
        if changed:
            where = f"the end of `{lost.stage}`" if lost.end else f"`{lost.stage}@{lost.iter}`"
            text = (
                f"{where} is missing and would be trained again, in another environment than before ({lost.like.name}); "
                f"with other bits {listed([f'`{name}`' for name in lost.unasked])}, which start from it, would be stale"
            )
            texts += [text, *(f"  {change}" for change in changed)]
            names |= dict.fromkeys(lost.unasked)
    if texts:
        redo = " ".join(f"--redo {name}" for name in names)
        raise ResumeRefused(
            "\n".join(texts),
            f"run in the same environment; or `{redo}` trains these stages again here if the bits differ",
        )


def _changed(schedule: Schedule, before: SnapshotRef, now: Mapping[str, str], evaluated: bool = False) -> list[str]:
    """Return the differences. `evaluated`: no training is left, so the training images don't matter."""
    then, today = dict(before.environment), dict(now)
    old, new = then.pop(TRAINING_SET, ""), today.pop(TRAINING_SET, "")
    changes = differences(then, today, schedule.determinism)
    if evaluated or not (old or new) or same_set(old, new):
        return changes
    return [*changes, f"{TRAINING_SET}: {old or 'unknown'} -> {new or 'unknown'}"]
