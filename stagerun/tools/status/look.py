"""What `status` says of an output folder: whether a run is alive, how far it is, and what it has to say."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagerun import store
from stagerun.base.errors import ExitCode
from stagerun.base.events import (
    CompressionChosen,
    EnsembleTested,
    Failed,
    NotFinite,
    PieceStarted,
    RunFinished,
    RunStarted,
    StageFinished,
    StageStarted,
    Stopped,
)
from stagerun.base.pace import DONE, STALE, TO_DO, Staleness, pace, progress_line, share
from stagerun.base.snapshots import Inventory
from stagerun.base.wings import wing
from stagerun.logs.lines import warning_of
from stagerun.logs.log_file import LOG, Life, read_last_life
from stagerun.plan import Plan, State, make_plan
from stagerun.plan.counting import under
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.tools.status.evaluated import Evaluation, ensembles, evaluations
from stagerun.tools.status.output import DISK, Target, newest_recipe, newest_snapshot
from stagerun.train.hours import TimeLeft
from stagerun.train.results import fruitless, standing

_LOOK_S = 0.25
SILENT = 300  # seconds without a line in the log, after which a living run is said to be silent


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training is, or was when it ended. What is measured is None before the first iteration of a process life."""

    stage: str
    number: int = 0
    stages: int = 0
    iter: int = 0
    max_iter: int = 0
    iterations_left: int = 0  # of all stages
    line: str
    epoch: float | None = None
    lr: float | None = None
    loss: float | None = None
    images_per_second: float | None = None
    # By rank 0 in an iteration, on average, of a stage that sends less than all gradients.
    sent_bytes: float | None = None
    dense_bytes: int | None = None  # what all gradients would be, uncompressed
    staleness: Staleness | None = None  # of the last pushes, of a stage with `method: ASYNC`
    seconds_left_in_stage: float | None = None
    seconds_left: float | None = None
    left: Mapping[str, float] = field(default_factory=dict)  # seconds by stage and ensemble; others under ''


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
    """Times are in seconds since the epoch. `reason` is why it stopped or failed, `exit_code` that of one that has ended with a
    word. `stuck`: a run would refuse to go on, since the last few got nowhere. `state`:

    nothing    no run has started here
    starting   the folder is held, by a run that has not logged anything yet
    running    the folder is held
    finished   the last run came to its end
    stopped    it was asked to stop, and saved
    failed     it ended in an error
    killed     it ended without a word
    elsewhere  it ended without a word, or runs on where this machine can't see it: what `holder` says is its last sign of life. Only of
               a `look` that doesn't wait for the next one
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
    ensembles: tuple[EnsembleTested, ...]
    warnings: tuple[Warned, ...]
    unreadable_lines: int
    not_finite: int = 0  # iterations of this process life whose loss or gradients were not finite
    forbidden: tuple[str, ...] = ()  # snapshots that this user may not read
    stuck: bool = False
    stages: Mapping[str, str] = field(default_factory=dict)  # how far each is, as `run` shows it
    # By stage, how its gradients are sent: where `method: AUTO` chose it, and where the schedule says how, or when replicas meet.
    chosen: Mapping[str, str] = field(default_factory=dict)
    gradients: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[Progress, ...] = ()  # stages at work side by side (`run --parallel`), in place of `progress`
    broken_off: tuple[Progress, ...] = ()  # those of a run that was killed, or failed
    not_chosen: tuple[str, ...] = ()  # of one that finished: stages that it left out, and that are still to be trained


def look(target: Target, now: float, say: Callable[[str], None] | None = None) -> Status:
    """Changes nothing. StorageError, PermissionDenied, ResumeRefused as of `store.inventory`. `say` hears that a sign of life of
    another machine's run is waited for; without it nothing is waited for."""
    out = target.out
    holder, away = _holder(out)  # before the log, or a run that ends in between would seem to be killed
    life = read_last_life(out / LOG)
    if holder is None:
        holder, away = _holder(out)  # or one that starts in between
    found = store.inventory(DISK, out, looking=True)
    state, reason, code = _state(out, holder, life)
    if away is not None and state in ("killed", "nothing"):
        if say is None:
            state, holder = "elsewhere", away
        elif (heard := listen(out, say)) is not None:
            holder, life = heard, read_last_life(out / LOG)
            state, reason, code = _state(out, holder, life)
    run = life.run
    if state == "starting":
        life = Life()
    snapshot = None
    if (newest := newest_snapshot(found)) is not None:
        snapshot = NewestSnapshot(name=newest.name, bytes=newest.bytes, written=written(out, newest.name))
    plan = make_plan(target.schedule, found) if target.schedule else None
    stored = None if plan else newest_recipe(out, found)
    whole = plan or (make_plan(stored, Inventory()) if stored else None)
    time_left = TimeLeft(whole, out) if whole else None
    inventory = plan.inventory if plan else under(found, life.names)  # under the names that the stages have now
    side_by_side = wing("tools.parallel.folder.last_lives")
    beside: dict[str, Life] = {}  # what stages that are trained side by side have logged
    if side_by_side is not None and state in ("running", "killed", "failed"):
        beside = side_by_side(out)
    lives = (life, *beside.values())
    last = max((one.last for one in lives if one.last), key=lambda line: line[0], default=None)
    starting = {stage: Progress(stage=stage, line=f"{stage}: starting") for stage in beside}
    at_work = tuple(_progress(one, time_left) or starting[stage] for stage, one in beside.items())
    running = state == "running"
    progress = None if running and at_work else _progress(life, time_left)
    left = life.last[1].not_chosen if life.last and isinstance(life.last[1], RunFinished) else ()
    evaluated = evaluations(out, plan, life, inventory)
    told = [(at, warning_of(event)) for one in lives for at, event in one.seen]
    return Status(
        state=state,
        schedule=target.schedule.name if target.schedule else run.schedule if run else out.name,
        out=str(out),
        holder=holder,
        run=life.run,
        reason=reason,
        exit_code=code,
        last_event=type(last[1]).__name__ if last else "",
        last_logged=last[0] if last else None,
        silent=running and last is not None and now - last[0] > SILENT,
        progress=progress,
        snapshot=snapshot,
        evaluations=evaluated,
        stages=_marks(plan, run, evaluated, progress, at_work, left) if run else {},
        ensembles=ensembles(out, plan, life, inventory),
        warnings=tuple(Warned(time=at, text=text) for at, text in told if text is not None),
        beside=at_work if running else (),
        broken_off=() if running else at_work,
        unreadable_lines=life.unreadable,
        forbidden=found.forbidden,
        not_finite=len(list(life.of(NotFinite))),
        stuck=state in ("failed", "killed") and _stuck(target, found),
        chosen={event.stage: event.words for event in life.of(CompressionChosen)},
        gradients={event.stage: event.gradients for event in life.of(StageStarted) if event.gradients},
        not_chosen=left,
    )


def listen(out: Path, say: Callable[[str], None]) -> store.Holder | None:
    """Who holds the folder, where a life that another machine has started gives a sign that this one can see: its next beat, for which
    it has as long as a run gives it that would take over, or one that started meanwhile. By this machine's monotonic clock alone.
    StorageError, PermissionDenied."""
    if (last := store.last_word(DISK, out)) is None:
        return None
    first = store.last_lives(DISK, out, 1)
    say(f"no lock shows {last[0].text}: looking for a sign of life, for {store.SILENT_S:g} s at most")
    end = time.monotonic() + store.SILENT_S
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        if store.last_lives(DISK, out, 1) != first:
            now = store.last_word(DISK, out)
            return now[0] if now is not None else None
    return None


def _state(out: Path, holder: store.Holder | None, life: Life) -> tuple[str, str, int | None]:
    """`Status.state`, and why it ended and with which exit code."""
    if holder is not None:
        return ("running" if _is_of(holder, out, life) else "starting"), "", None
    if life.last is None:
        newest = _newest_life(out)
        if newest is None or newest.code == ExitCode.DONE:
            return "nothing", "", None
        state = "killed" if newest.code is None else "stopped" if newest.code == ExitCode.SAVED else "failed"
        return state, "", newest.code
    match life.last[1]:
        case RunFinished():
            return "finished", "", int(ExitCode.DONE)
        case Stopped(reason=reason):
            return "stopped", reason, int(ExitCode.SAVED)
    failed = list(life.of(Failed))
    return ("failed", failed[-1].text, failed[-1].code) if failed else ("killed", "", None)


def _is_of(holder: store.Holder, out: Path, life: Life) -> bool:
    """Whether the logged life is the holder's, and not its predecessor's."""
    if life.run is None:
        return False
    if not life.run.attempt:  # a log of before: by the clock. The lock is taken before the log is opened.
        return holder.since is None or life.seen[0][0] >= holder.since
    # No clock, which may be set back: the holder's life is the newest, once it has taken one, and it has not ended.
    newest = _newest_life(out)
    if newest is None or newest.attempt != life.run.attempt or newest.code is not None:
        return False
    return holder.pid is None or (holder.pid, holder.host) == (newest.process.pid, newest.process.host)


def _newest_life(out: Path) -> store.Life | None:
    """None also where it can't be read."""
    return next((life for life in store.last_lives(DISK, out, 1) if life.readable), None)


def _holder(out: Path) -> tuple[store.Holder | None, store.Holder | None]:
    """Who holds the folder; else who may hold it, by a lease that only its next beat would prove alive."""
    if (holder := store.holder(out)) is not None:
        return holder, None
    who, lives = store.last_word(DISK, out) or (None, False)
    return (who, None) if lives else (None, who)


def _stuck(target: Target, found: Inventory) -> bool:
    """As `run` asks. Without a schedule it is that of the newest snapshot; without either what the last life started from must do."""
    if (schedule := target.schedule or newest_recipe(target.out, found)) is not None:
        return bool(fruitless(DISK, target.out, standing(DISK, target.out, schedule, found)))
    last = None if found.snapshots else _newest_life(target.out)
    return last is not None and bool(fruitless(DISK, target.out, last.newest))


def _progress(life: Life, time_left: TimeLeft | None) -> Progress | None:
    """Where training is: in a stage, or in a piece of one that is trained once more."""
    *_, newest = None, *life.of(StageStarted, StageFinished, PieceStarted)
    stages = life.run.stages if life.run else ()
    if isinstance(newest, PieceStarted):
        return _in_piece(newest, life, stages)
    if (start := life.stage) is None:
        return None
    place: dict[str, Any] = {
        "stage": start.stage, "number": start.number, "stages": len(stages), "max_iter": start.max_iter,
    }  # fmt: skip
    if not life.window:
        line = f"stage {start.number}/{len(stages)} {start.stage}  {start.iter}/{start.max_iter}  no iteration yet"
        return Progress(**place, iter=start.iter, iterations_left=start.iterations_left, line=line)
    now = life.window[-1]
    left = start.iterations_left - (now.iter - start.iter)
    speed = pace(life.window, life.met)
    seconds = speed.seconds_per_iteration
    parts = time_left(start.stage, now.iter, left, seconds) if time_left else {"": left * seconds}
    in_stage, in_all = parts.get(start.stage, (start.max_iter - now.iter) * seconds), sum(parts.values())
    return Progress(
        **place,
        iter=now.iter,
        iterations_left=left,
        line=progress_line(start, len(stages), life.window, (in_stage, in_all), life.met),
        epoch=now.epoch,
        lr=now.lr,
        loss=speed.loss,
        images_per_second=speed.images_per_second,
        sent_bytes=speed.sent_bytes if start.dense_bytes else None,
        dense_bytes=start.dense_bytes or None,
        staleness=speed.staleness,
        seconds_left_in_stage=in_stage,
        seconds_left=in_all,
        left=parts,
    )


def _in_piece(piece: PieceStarted, life: Life, stages: Sequence[str]) -> Progress:
    last = life.retraced[-1] if life.retraced else None
    iter = last.iter if last else piece.iter
    pace = sum(e.seconds for e in life.retraced) / len(life.retraced) if last else None
    return Progress(
        stage=piece.stage,
        number=stages.index(piece.stage) + 1 if piece.stage in stages else 0,
        stages=len(stages),
        iter=iter,
        max_iter=piece.until,
        iterations_left=piece.iterations_left - (iter - piece.iter),
        line=f"{piece.stage} again, for {', '.join(piece.children)}  {iter}/{piece.until}",
        lr=last.lr if last else None,
        loss=last.loss if last else None,
        seconds_left_in_stage=None if pace is None else (piece.until - iter) * pace,
    )


def _marks(
    plan: Plan | None,
    run: RunStarted,
    evaluated: Sequence[Evaluation],
    progress: Progress | None,
    beside: Sequence[Progress],
    left: Sequence[str],
) -> dict[str, str]:
    """Without a plan, a stage counts as done if it has a result of its end, which is stale if the last run has `left` the stage to be trained.
    `beside`: stages at work side by side, which no plan knows of."""
    ends = [e.stage for e in evaluated if e.snapshot and plan is None]
    marks = dict.fromkeys(run.stages, TO_DO) | {name: STALE if name in left else DONE for name in ends}
    for planned in plan.stages if plan else ():
        if planned.state is not State.DISABLED:
            mark = {State.DONE: DONE, State.STALE: STALE}.get(planned.state)
            marks[planned.stage.name] = mark or share(planned.iter, planned.iter and planned.last)
    if progress is not None and marks.get(progress.stage, DONE) not in (DONE, STALE):
        marks[progress.stage] = share(progress.iter, progress.max_iter)
    return marks | {one.stage: share(one.iter, one.max_iter or 1) for one in beside if one.stage in marks}


def elsewhere(target: Target) -> str:
    """A hint where nothing is in the default output folder; '' where --out or an output folder was given."""
    if target.folder is None:
        return ""
    return "\n  hint: `run` writes to out/NAME in the folder it is called in; name another one with --out"


def written(out: Path, name: str) -> float | None:
    """When a snapshot was written, by the file system, for people. None if it is gone meanwhile."""
    try:
        return (snapshots_folder(out) / name / MANIFEST).stat().st_mtime
    except OSError:
        return None
