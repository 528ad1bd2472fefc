"""What `status` tells of an output folder: whether a run is alive, how far it is, and what it has to say."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagerun import store
from stagerun.cli.log_tail import Life, earlier_tests, read_last_life, started
from stagerun.cli.looking import DISK, LOG, Target, last_result, newest_snapshot, written
from stagerun.events import (
    EnsembleTested,
    Event,
    Failed,
    Iterated,
    Note,
    PieceStarted,
    Retraced,
    RunFinished,
    RunStarted,
    SnapshotFailed,
    StageFinished,
    StageStarted,
    Stopped,
    Tested,
)
from stagerun.pace import WINDOW, pace, progress_line
from stagerun.runner.results import read_ensemble
from stagerun.snapshots import Inventory

SILENT = 300  # seconds without a line in the log, after which a living run is said to be silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training is, or was when it ended. What is measured is None before the first iteration of a process life."""

    stage: str
    number: int
    stages: int
    iter: int
    max_iter: int
    iterations_left: int  # of all stages
    line: str
    epoch: float | None = None
    lr: float | None = None
    loss: float | None = None
    images_per_second: float | None = None
    seconds_left_in_stage: float | None = None
    seconds_left: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The last one of a stage. `snapshot` is '' for one inside a stage."""

    stage: str
    iter: int
    top1: float | None
    top5: float | None
    loss: float | None
    ema_top1: float | None = None
    ema_top5: float | None = None
    ema_loss: float | None = None
    snapshot: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TogetherEvaluated:
    """An ensemble. `gain` is of top-1 over the best member."""

    name: str
    rule: str
    members: tuple[str, ...]
    top1: float
    top5: float
    loss: float | None
    best: str
    gain: float
    gain_over_mean: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestSnapshot:
    name: str
    bytes: int
    written: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    time: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Times are in seconds since the epoch. `reason` is why it stopped or failed, `exit_code` that of one that failed.
    `state`:

    nothing    no run has written a log here
    starting   the folder is held, by a run that has not logged anything yet
    running    the folder is held
    finished   the last run came to its end
    stopped    it was told to stop, and saved
    failed     it ended in an error
    killed     it ended without a word
    """

    state: str
    schedule: str
    out: str
    holder: store.Holder | None
    run: RunStarted | None
    reason: str
    exit_code: int | None
    last_event: str
    last_logged: float | None
    silent: bool
    progress: Progress | None
    snapshot: NewestSnapshot | None
    evaluations: tuple[Evaluation, ...]
    ensembles: tuple[TogetherEvaluated, ...]
    warnings: tuple[Warned, ...]
    unreadable_lines: int
    not_chosen: tuple[str, ...] = ()  # of one that finished: stages that it left out, and that are still to be trained


def look(target: Target, now: float) -> Status:
    """Changes nothing. StorageError, PermissionDenied, ResumeRefused as of `store.inventory`."""
    holder = store.holder(target.out)  # before the log, or a run that ends in between would seem to be killed
    life = read_last_life(target.out / LOG)
    if holder is None:
        holder = store.holder(target.out)  # or one that starts in between
    inventory = store.inventory(DISK, target.out)
    run = started(life) if life else None
    state, said = _state(holder, life)
    if state == "starting":
        life = None
    newest = newest_snapshot(target.out, inventory)
    last = life.last if life else None
    return Status(
        state=state,
        schedule=target.schedule.name if target.schedule else run.schedule if run else target.out.name,
        out=str(target.out),
        holder=holder,
        run=run if life else None,
        reason=said.reason if isinstance(said, Stopped) else said.text if said else "",
        exit_code=said.code if isinstance(said, Failed) else None,
        last_event=type(last[1]).__name__ if last else "",
        last_logged=last[0] if last else None,
        silent=state == "running" and last is not None and now - last[0] > SILENT,
        progress=_progress(life) if life else None,
        snapshot=None if newest is None else NewestSnapshot(
            name=newest.name, bytes=newest.bytes, written=written(target.out, newest.name)
        ),
        evaluations=_evaluations(target, life, inventory),
        ensembles=tuple(_together(e) for e in _ensembles(target, life, inventory)),
        warnings=_warnings(life) if life else (),
        unreadable_lines=life.unreadable if life else 0,
        not_chosen=last[1].not_chosen if last and isinstance(last[1], RunFinished) else (),
    )  # fmt: skip


def _state(holder: store.Holder | None, life: Life | None) -> tuple[str, Stopped | Failed | None]:
    """And the event that says why it ended."""
    run_started = next((t for t, e in life.seen if isinstance(e, RunStarted)), None) if life else None
    if holder is not None:
        # The lock is taken before the log is opened, and its time is cut to the second.
        mine = run_started is not None and (holder.since is None or run_started >= holder.since)
        return ("running" if mine else "starting"), None
    if life is None or life.last is None:
        return "nothing", None
    match life.last[1]:
        case RunFinished():
            return "finished", None
        case Stopped() as stopped:
            return "stopped", stopped
    failed = list(life.of(Failed))
    return ("failed", failed[-1]) if failed else ("killed", None)


def _begun(life: Life) -> StageStarted | None:
    """The newest start of a stage."""
    begun: list[StageStarted] = list(life.of(StageStarted))
    return begun[-1] if begun else None


def _piece(life: Life) -> Progress | None:
    """Where training is, if that is a piece of a stage that is trained once more."""
    kinds = (StageStarted, StageFinished, PieceStarted, Retraced)
    told: list[Event] = list(life.of(*kinds))
    begun = next((e for e in reversed(told) if isinstance(e, PieceStarted)), None)
    if begun is None or not isinstance(told[-1], PieceStarted | Retraced):
        return None
    run = started(life)
    stages = run.stages if run else ()
    steps = told[told.index(begun) + 1 :]
    last = steps[-1] if steps else None
    iter = last.iter if isinstance(last, Retraced) else begun.iter
    speeds = [e.seconds for e in steps[-WINDOW:] if isinstance(e, Retraced)]
    pace_ = sum(speeds) / len(speeds) if speeds else None
    return Progress(
        stage=begun.stage,
        number=stages.index(begun.stage) + 1 if begun.stage in stages else 0,
        stages=len(stages),
        iter=iter,
        max_iter=begun.until,
        iterations_left=begun.iterations_left - (iter - begun.iter),
        line=f"{begun.stage} again, for {', '.join(begun.children)}  {iter}/{begun.until}",
        lr=last.lr if isinstance(last, Retraced) else None,
        loss=last.loss if isinstance(last, Retraced) else None,
        seconds_left_in_stage=None if pace_ is None else (begun.until - iter) * pace_,
    )


def _progress(life: Life) -> Progress | None:
    if (piece := _piece(life)) is not None:
        return piece
    run, begun = started(life), _begun(life)
    if begun is None:
        return None
    stages = len(run.stages) if run else 0
    place: dict[str, Any] = {"stage": begun.stage, "number": begun.number, "stages": stages, "max_iter": begun.max_iter}
    if not life.window:
        line = f"stage {begun.number}/{stages} {begun.stage}  {begun.iter}/{begun.max_iter}  no iteration yet"
        return Progress(**place, iter=begun.iter, iterations_left=begun.iterations_left, line=line)
    now: Iterated = life.window[-1]
    left = begun.iterations_left - (now.iter - begun.iter)
    speed = pace(life.window)
    return Progress(
        **place,
        iter=now.iter,
        iterations_left=left,
        line=progress_line(begun, stages, life.window, left),
        epoch=now.epoch,
        lr=now.lr,
        loss=speed.loss,
        images_per_second=speed.images_per_second,
        seconds_left_in_stage=(begun.max_iter - now.iter) * speed.seconds_per_iteration,
        seconds_left=left * speed.seconds_per_iteration,
    )


def _evaluations(target: Target, life: Life | None, inventory: Inventory) -> tuple[Evaluation, ...]:
    """In the order of the schedule, as far as that is known."""
    run = started(life) if life else None
    order = [s.name for s in target.schedule.stages] if target.schedule else list(run.stages) if run else []
    inside = _inside(target.out, life) if life else {}
    found = []
    for stage in dict.fromkeys([*order, *(ref.stage for ref in inventory.snapshots)]):
        if stage in inside:
            found.append(_evaluation(inside[stage]))
        elif (last := last_result(target.out, inventory.of(stage))) is not None:
            found.append(_of_result(last[1]))
    return tuple(found)


def _ensembles(target: Target, life: Life | None, inventory: Inventory) -> Iterator[EnsembleTested]:
    """In the order of the schedule, as far as that is known; those whose members were not trained again since."""
    run = started(life) if life else None
    names = [e.name for e in target.schedule.ensembles] if target.schedule else list(run.ensembles) if run else []
    newest = {ref.stage: ref.id for ref in inventory.snapshots}  # by attempt and iteration
    for name in names:
        tested = read_ensemble(target.out, name)
        if tested is not None and tuple(newest.get(member) for member in tested.members) == tested.snapshots:
            yield tested


def _together(tested: EnsembleTested) -> TogetherEvaluated:
    return TogetherEvaluated(
        name=tested.name,
        rule=tested.rule,
        members=tested.members,
        top1=tested.top1,
        top5=tested.top5,
        loss=tested.loss,
        best=tested.best,
        gain=tested.gain,
        gain_over_mean=tested.gain_over_mean,
    )


def _inside(out: Path, life: Life) -> dict[str, list[Tested]]:
    """By stage, the newest evaluation that no StageFinished has followed: of the trained weights and of the averaged ones."""
    found: dict[str, list[Tested]] = {}
    begun = _begun(life)
    if begun is not None and begun.iter > 0:  # in the lives before
        found[begun.stage] = earlier_tests(out / LOG, begun.stage)
    for event in life.of(Tested, StageFinished):
        if isinstance(event, StageFinished):
            found.pop(event.stage, None)
        else:
            found.setdefault(event.stage, []).append(event)
    return {stage: [t for t in tests if t.iter == tests[-1].iter] for stage, tests in found.items() if tests}


def _evaluation(tests: Iterable[Tested]) -> Evaluation:
    by_kind = {test.ema: test for test in tests}
    own, averaged = by_kind.get(False), by_kind.get(True)
    one = own or by_kind[True]
    return Evaluation(
        stage=one.stage,
        iter=one.iter,
        top1=own.top1 if own else None,
        top5=own.top5 if own else None,
        loss=own.loss if own else None,
        ema_top1=averaged.top1 if averaged else None,
        ema_top5=averaged.top5 if averaged else None,
        ema_loss=averaged.loss if averaged else None,
    )


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


def _warnings(life: Life) -> tuple[Warned, ...]:
    found = []
    for time, event in life.seen:
        match event:
            case Note(text=text, warning=True):
                found.append(Warned(time=time, text=text))
            case SnapshotFailed():
                text = f"no snapshot of {event.stage} at {event.iter}: {event.message}"
                found.append(Warned(time=time, text=text))
    return tuple(found)
