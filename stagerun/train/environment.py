"""What the bits of a stage depend on besides its definition, and what a run promises where it resumes."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

import stagerun
from stagerun.base.errors import ResumeRefused
from stagerun.base.events import Note
from stagerun.base.recipe import Determinism, Ensemble, Schedule, Stage
from stagerun.base.snapshots import TRAINING_SET, SnapshotRef, same_set
from stagerun.base.text import listed
from stagerun.comm import Comm, gather_json, layout_of
from stagerun.data.transform import pixels_made_by
from stagerun.engine.augment import colours_made_by
from stagerun.engine.device import RECORDED_SINCE, differences, environment, flags_apart
from stagerun.plan import Plan, PlannedStage, State

# What the bits of a stage depend on besides its definition, in this process.
Environment = Callable[[Stage], Mapping[str, str]]


def other_machines(comm: Comm, device: torch.device) -> str:
    """Describe what other ranks compute with, if it differs from rank 0; '' if all are alike. Collective."""
    first, *others = gather_json(comm, _machine(device, comm.size, ""))
    ranks: dict[str, list[str]] = {}
    for rank, other in enumerate(others, 1):
        said = {n: other.get(n, "none") for n in sorted(other.keys() | first.keys()) if other.get(n) != first.get(n)}
        if "processor flags" in said:
            said["processor flags"] = flags_apart(first.get("processor flags", ""), said["processor flags"])
        if said:
            ranks.setdefault(", ".join(f"{name} {text}" for name, text in said.items()), []).append(str(rank))
    return "; ".join(f"rank{'s' if len(who) > 1 else ''} {' '.join(who)}: {text}" for text, who in ranks.items())


def _machine(device: torch.device, workers: int, reducer: str) -> dict[str, str]:
    return environment(device, workers, reducer) | {"stagerun": stagerun.__version__, "image library": pixels_made_by()}


def environment_of(
    schedule: Schedule, stage: Stage, device: torch.device, workers: int, others: str = ""
) -> dict[str, str]:
    """Return what the stage's snapshots record, and what is compared with the snapshot that it resumes from. `others`: see `other_machines`."""
    found = _machine(device, workers, layout_of(schedule.determinism, workers))
    if others:
        found["other ranks"] = others
    if stage.data.train.path in schedule.sets:
        found[TRAINING_SET] = schedule.sets[stage.data.train.path]
    if stage.solver.transform.changes_colours:
        found["colour library"] = colours_made_by()
    if stage.solver.transform.python:  # what a generator draws may be another in another version
        found["numpy"] = np.__version__
    return found


def promise(schedule: Schedule, planned: PlannedStage, now: dict[str, str], replays: bool = False) -> Note | None:
    """Say BIT-EXACT, or EQUIVALENT and why, on rank 0. A stage that starts has nothing to be exact to: only an environment
    unlike its parent's is reported. If the evaluation of a finished stage was interrupted, the evaluation is what resumes. Pushes of
    several workers (`method: ASYNC`) are exact only to a record (`replays`), with any number of workers."""
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
        text = "goes on in an order of pushes that no other run has: its bits are promised to a replay of its record (--replay)"
        return Note(text=f"{what} {text}")
    if changed:
        return Note(text=f"{what} is EQUIVALENT, not BIT-EXACT{like}: " + "; ".join(changed), warning=True)
    if not piece and planned.state is State.FRESH:
        return None
    if now["device"] != "cpu":
        return Note(
            text=f"{what} with everything as before{like}; that a GPU then gives the same bits was not verified"
        )
    same = before.environment.get("workers") == now["workers"] and not (pushes and replays)
    alike = "threads, workers and reducer" if same else "threads and reducer"
    images = ""
    if TRAINING_SET in now and not tested:
        whole = all("index " in found[TRAINING_SET] for found in (before.environment, now))
        images = ", training images" if whole else ", training images as far as 32 of them show"
    return Note(text=f"{what} is BIT-EXACT{like}: same torch build{images}, processor, instruction set, {alike}")


def promise_of_ensemble(
    schedule: Schedule, ensemble: Ensemble, members: Iterable[SnapshotRef], environment: Environment
) -> Note | None:
    """Say EQUIVALENT and why, if a member was trained in another environment than the ensemble is evaluated in."""
    changed: dict[str, None] = {}
    for (name, _), ref in zip(ensemble.points, members, strict=True):
        now = environment(schedule.stage(name))
        evaluated = not ensemble.averages  # else its statistics are of the training images
        changed |= dict.fromkeys(_changed(schedule, ref, now, evaluated))
    if not changed:
        return None
    text = f"ensemble {ensemble.name} is EQUIVALENT, not BIT-EXACT, to one without a stop: " + "; ".join(changed)
    return Note(text=text, warning=True)


def require_exact(said: Note | None) -> None:
    """Raise ResumeRefused if what comes next does not promise the same bits. `said`: the promise."""
    if said is not None and (said.warning or "is BIT-EXACT" not in said.text):
        raise ResumeRefused(
            f"--require-bit-exact: {said.text}",
            "run where all is as before; without the option training goes on here, equivalent but for rounding",
        )


def require_same(plan: Plan, environment: Environment) -> None:
    """Raise ResumeRefused if the plan would train a missing snapshot again in another environment, and finished stages started from it:
    they would be stale afterwards. Stages that --redo names may be."""
    schedule, texts, names = plan.schedule, list[str](), dict[str, None]()
    for lost in plan.lost:
        if lost.like is None or not lost.unasked:
            continue
        now = environment(schedule.stage(lost.stage))
        # What no one recorded may be as it was; if not, the plan sees other bits when they are there.
        unknown = (RECORDED_SINCE | {TRAINING_SET}) - lost.like.environment.keys()
        changed = _changed(schedule, lost.like, {name: value for name, value in now.items() if name not in unknown})
        if changed:
            where = f"the end of `{lost.stage}`" if lost.end else f"`{lost.stage}@{lost.iter}`"
            text = (
                f"{where} is gone and would be trained again, in another environment than before ({lost.like.name}); "
                f"with other bits {listed([f'`{name}`' for name in lost.unasked])}, which came from there, would be stale"
            )
            texts += [text, *(f"  {change}" for change in changed)]
            names |= dict.fromkeys(lost.unasked)
    if texts:
        redo = " ".join(f"--redo {name}" for name in names)
        raise ResumeRefused(
            "\n".join(texts),
            f"run where all is as before; or `{redo}` goes on here and, if other bits come, trains what came from there and what follows "
            "from it again",
        )


def _changed(schedule: Schedule, before: SnapshotRef, now: Mapping[str, str], evaluated: bool = False) -> list[str]:
    """Return what differs. `evaluated`: nothing is trained any more, so the training images don't matter."""
    of_then, of_now = dict(before.environment), dict(now)
    old, new = (found.pop(TRAINING_SET, "") for found in (of_then, of_now))
    found = differences(of_then, of_now, schedule.determinism is Determinism.ELASTIC)
    if evaluated or not (old or new) or same_set(old, new):
        return found
    return [*found, f"{TRAINING_SET}: {old or 'unknown'} -> {new or 'unknown'}"]
