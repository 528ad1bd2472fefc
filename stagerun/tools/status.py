"""`stagerun status`: whether a run is alive, how far it is, how much longer it takes, and its warnings. Changes nothing."""

import json
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode, ResumeRefused
from stagerun.base.events import Failed, PieceStarted, RunFinished, RunStarted, StageFinished, StageStarted, Stopped
from stagerun.base.pace import DONE, STALE, TO_DO, pace, progress_line, share, strip
from stagerun.base.snapshots import passed_over
from stagerun.base.text import columns, count, duration, listed, percent, size
from stagerun.command.ending import show
from stagerun.command.options import command
from stagerun.logs.lines import left_out, warning_of
from stagerun.logs.log_file import LOG, Life, read_last_life
from stagerun.plan import Plan, State, make_plan, under
from stagerun.tools.output import DISK, Target, find_target, newest_recipe, newest_snapshot, written
from stagerun.tools.snapshots import StatusOptions, show_snapshots
from stagerun.train.hours import TimeLeft
from stagerun.train.results import LIMIT, fruitless, read_result, standing

SILENT_S = 300  # a living run that logs nothing for so long is called silent
MOST_WARNINGS = 10
_DONE = {State.DONE: DONE, State.STALE: STALE}
MOST_HOSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The position of training, or its last one. What is measured is None before the first iteration of a process life."""

    stage: str
    number: int = 0
    stages: int = 0
    iter: int = 0
    max_iter: int = 0
    line: str = ""
    iterations_left: int = 0  # of all stages
    epoch: float | None = None
    lr: float | None = None
    loss: float | None = None
    images_per_second: float | None = None
    seconds_left_in_stage: float | None = None
    seconds_left: float | None = None
    left: Mapping[str, float] = field(default_factory=dict)  # seconds by stage and ensemble; of anything else under ''


@dataclass(frozen=True, slots=True)
class Warned:
    time: float
    text: str


@dataclass(frozen=True, slots=True)
class NewestSnapshot:
    name: str
    bytes: int
    written: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Times are in seconds since the epoch. `stuck`: a run would refuse to resume, since the last few made no progress. `state`:

    nothing    no run has started here
    starting   a run holds the folder, and has logged nothing yet
    running    a run holds the folder
    finished   the last run came to its end
    stopped    the last run was asked to stop, and saved
    failed     the last run ended in an error: `reason`, `exit_code`
    killed     the last run ended without a word
    elsewhere  a process on a machine that this one can't see may hold the folder: `holder`
    """

    state: str
    schedule: str
    out: str
    holder: store.Holder | None
    run: RunStarted | None
    reason: str
    exit_code: int | None
    last_logged: float | None
    silent: bool
    stuck: bool
    progress: Progress | None
    at_work: tuple[
        Progress, ...
    ]  # stages that are trained side by side (`run --parallel`), or were when the run was killed
    stages: Mapping[str, str]  # the mark of each stage, as `run` shows it
    top1: Mapping[str, float]  # by stage, of what is on disk
    snapshot: NewestSnapshot | None
    warnings: tuple[Warned, ...]
    forbidden: tuple[str, ...]  # snapshots that this user may not read
    not_chosen: tuple[str, ...]  # stages that a finished run left out and that are still to be trained


@command(grouped=True)
def status(options: StatusOptions) -> None:
    """Shows whether a run is alive, how far it is, and its warnings, from any terminal; with --snapshots, what is saved.

    DIR is the schedule's folder, or the output folder itself. A run is alive while it holds the lock of the output folder. Of a run on another
    host that locks don't reach, status shows when it last logged.

    A snapshot is complete if its manifest is unchanged and its files have the right sizes; --verify reads the files too. What the column
    `needed` leaves empty can be deleted by hand while no run is alive.
    """
    target = find_target(options.folder, options.overrides, options.out)
    if options.snapshots or options.verify or options.pin or options.unpin:
        return show_snapshots(target, options)
    now = time.time()
    seen = look(target, now)
    if options.as_json:
        show(json.dumps(asdict(seen), indent=1))
    else:
        show(status_text(seen, now) + (target.hint if seen.state == "nothing" else ""), marks=seen.stages)


# -- looking


def look(target: Target, now: float) -> Status:
    out = target.out
    holder, certain = _holder(out)  # before the log: else a run that ends in between would seem killed
    life = read_last_life(out / LOG)
    if holder is None:
        holder, certain = _holder(out)  # a run that started in between
    state, reason, code = _state(out, holder if certain else None, life)
    if not certain and state in ("killed", "nothing"):
        state = "elsewhere"
    run, life = life.run, Life() if state == "starting" else life
    # Each stage of `run --parallel` has a folder, marked by a file, and a log.
    marked = sorted(out.glob(".parallel/*/.stage")) if state in ("running", "killed", "failed") else []
    side_by_side = {mark.parent.name: read_last_life(mark.parent / LOG) for mark in marked}
    lives = (life, *side_by_side.values())
    snapshots = store.inventory(DISK, out, looking=True)
    plan = make_plan(target.schedule, snapshots) if target.schedule else None
    schedule = target.schedule or newest_recipe(out, snapshots)
    time_left = TimeLeft(plan or make_plan(schedule, store.Inventory()), out) if schedule else None
    inventory = plan.inventory if plan else under(snapshots, life.names)
    results = [result for ref in inventory.snapshots if (result := read_result(out, ref)) is not None]
    top1 = {result.stage: result.top1 for result in results if result.top1 is not None}
    progress = [_progress(one, time_left, stage) for stage, one in (side_by_side or {"": life}).items()]
    progress = [one for one in progress if one.stage]
    end = life.last[1] if life.last else None
    not_chosen = end.not_chosen if isinstance(end, RunFinished) else ()
    logged = max((one.last[0] for one in lives if one.last), default=None)
    marks = _marks(run, plan, inventory, {result.snapshot for result in results}, not_chosen)
    for one in progress:
        if marks.get(one.stage) not in (DONE, STALE):
            marks[one.stage] = share(one.iter, one.max_iter or 1)
    newest = newest_snapshot(snapshots)
    return Status(
        state=state,
        schedule=target.schedule.name if target.schedule else run.schedule if run else out.name,
        out=str(out),
        holder=holder if state in ("running", "starting", "elsewhere") else None,
        run=run,
        reason=reason,
        exit_code=code,
        last_logged=logged,
        silent=state == "running" and logged is not None and now - logged > SILENT_S,
        stuck=state in ("failed", "killed")
        and schedule is not None
        and bool(fruitless(DISK, out, standing(DISK, out, schedule, snapshots))),
        progress=None if side_by_side or not progress else progress[0],
        at_work=tuple(progress) if side_by_side else (),
        stages=marks,
        top1={stage: top1[stage] for stage in marks if stage in top1},
        snapshot=NewestSnapshot(newest.name, newest.bytes, written(out, newest.name)) if newest is not None else None,
        warnings=tuple(
            Warned(at, text) for one in lives for at, event in one.seen if (text := warning_of(event)) is not None
        ),
        forbidden=snapshots.forbidden,
        not_chosen=not_chosen,
    )


def _marks(
    run: RunStarted | None,
    plan: Plan | None,
    inventory: store.Inventory,
    evaluated: Collection[str],
    not_chosen: Collection[str],
) -> dict[str, str]:
    """Return how far each stage is: by the plan or, without the schedule's folder, by its newest snapshot. Its end is `evaluated`."""
    if run is None:
        return {}
    marks = dict.fromkeys(run.stages, TO_DO)
    if plan is not None:
        return marks | {
            one.name: _DONE.get(one.state) or share(one.iter, one.iter and one.last) for one in plan.enabled
        }
    for stage in marks:
        if refs := inventory.of(stage):
            with suppress(ResumeRefused):  # a snapshot that no run writes
                marks[stage] = share(refs[-1].iter, refs[-1].whole("solver.max_iter", 0))
            if any(ref.name in evaluated for ref in refs):
                marks[stage] = STALE if stage in not_chosen else DONE
    return marks


def _holder(out: Path) -> tuple[store.Holder | None, bool]:
    """Return who holds the folder, or may, and whether that is certain: of a process on another machine it may not be."""
    holder = store.holder(out)
    return (holder, True) if holder is not None else store.last_word(DISK, out) or (None, True)


def _state(out: Path, holder: store.Holder | None, life: Life) -> tuple[str, str, int | None]:
    """Return `Status.state`, why the last run ended, and its exit code."""
    newest = next((life for life in store.last_lives(DISK, out, 1) if life.readable), None)
    if holder is not None:
        # The logged life may be the previous one.
        logged = life.run is not None and (newest is None or (newest.attempt, newest.code) == (life.run.attempt, None))
        return ("running" if logged else "starting"), "", None
    end = life.last[1] if life.last else None
    if isinstance(end, RunFinished):
        return "finished", "", int(ExitCode.DONE)
    if isinstance(end, Stopped):
        return "stopped", end.reason, int(ExitCode.SAVED)
    if failed := list(life.of(Failed)):
        return "failed", failed[-1].text, failed[-1].code
    if end is not None:
        return "killed", "", None
    if newest is None or newest.code == ExitCode.DONE:
        return "nothing", "", None
    if newest.code is None:
        return "killed", "", None
    return "stopped" if newest.code == ExitCode.SAVED else "failed", "", newest.code


def _progress(life: Life, time_left: TimeLeft | None, stage: str) -> Progress:
    """Return the position of training, in a stage or in a piece of a stage that is trained once more. `stage`: what starts, if nothing is
    logged yet."""
    *_, newest = None, *life.of(StageStarted, StageFinished, PieceStarted)
    start = newest if isinstance(newest, PieceStarted) else life.stage
    if start is None:
        return Progress(stage=stage, line="starting")
    stages = life.run.stages if life.run else ()
    at = Progress(
        stage=start.stage,
        number=stages.index(start.stage) + 1 if start.stage in stages else 0,
        stages=len(stages),
        iter=start.iter,
        iterations_left=start.iterations_left,
    )
    if isinstance(start, PieceStarted):
        iter = life.retraced[-1].iter if life.retraced else start.iter
        line = f"{start.stage} again, for {', '.join(start.children)}  {iter}/{start.until}"
        return replace(at, iter=iter, max_iter=start.until, line=line)
    if not life.window:
        line = f"stage {at.number}/{at.stages} {start.stage}  {start.iter}/{start.max_iter}  no iteration yet"
        return replace(at, max_iter=start.max_iter, line=line)
    now, speed = life.window[-1], pace(life.window, life.met)
    remaining, seconds = start.iterations_left - (now.iter - start.iter), speed.seconds_per_iteration
    left = time_left(start.stage, now.iter, remaining, seconds) if time_left else {"": remaining * seconds}
    in_stage, in_all = left.get(start.stage, (start.max_iter - now.iter) * seconds), sum(left.values())
    return replace(
        at,
        iter=now.iter,
        max_iter=start.max_iter,
        line=progress_line(start, at.stages, life.window, (in_stage, in_all), life.met),
        iterations_left=remaining,
        epoch=now.epoch,
        lr=now.lr,
        loss=speed.loss,
        images_per_second=speed.images_per_second,
        seconds_left_in_stage=in_stage,
        seconds_left=in_all,
        left=left,
    )


# -- in words


def status_text(status: Status, now: float) -> str:
    lines = [f"{status.schedule}: {headline(status, now)}"]
    if (run := status.run) is not None:
        workers = (
            f"{count(run.side_by_side, 'worker')}, a stage each," if run.side_by_side else count(run.workers, "worker")
        )
        lines.append(f"{workers} on {run.device}, {count(run.threads, 'thread')} each, output in {status.out}")
        hosts = list(dict.fromkeys(run.hosts))  # in the order of ranks
        if len(hosts) > 1:
            lines.append(f"on {count(len(hosts), 'host')}: {listed(hosts, MOST_HOSTS)}")
    if status.stages:
        lines.append(strip(status.stages))
    if status.progress is not None and status.state != "finished":
        lines.append(status.progress.line)
    if status.state == "running":
        lines += _at_work(status.at_work)
        if status.last_logged is not None:
            lines.append(f"last logged {_ago(now, status.last_logged)}")
    if status.top1:
        lines.append("top-1: " + ", ".join(f"{stage} {percent(top1)}" for stage, top1 in status.top1.items()))
    if (newest := status.snapshot) is not None:
        when = f", {_ago(now, newest.written)}" if newest.written is not None else ""
        lines.append(f"newest snapshot {newest.name}, {size(newest.bytes)}{when}")
    warnings = [passed_over(name) for name in status.forbidden]
    if status.silent and status.last_logged is not None:
        warnings.append(f"warning: the run is alive, but last logged {_ago(now, status.last_logged)}")
    if len(status.warnings) > MOST_WARNINGS:
        warnings.append(f"{len(status.warnings) - MOST_WARNINGS} older warnings are in {LOG}")
    warnings += [f"warning {_ago(now, one.time)}: {one.text}" for one in status.warnings[-MOST_WARNINGS:]]
    return "\n".join([*lines, *([""] if warnings else []), *warnings])


def _ago(now: float, then: float) -> str:
    return f"{duration(max(0.0, now - then))} ago"  # the clock of another machine may be ahead


def _at_work(stages: Sequence[Progress]) -> list[str]:
    rows = [("at work", "iteration", "images/s", "left in stage")]
    for one in stages:
        speed = "" if one.images_per_second is None else f"{one.images_per_second:.0f}"
        left = "" if one.seconds_left_in_stage is None else duration(one.seconds_left_in_stage)
        rows.append((one.stage, f"{one.iter}/{one.max_iter}" if one.max_iter else one.line, speed, left))
    return columns(rows) if stages else []


def headline(status: Status, now: float) -> str:
    """Return whether the run is alive, how it ended, and what to do about it."""
    when = _ago(now, status.last_logged) if status.last_logged is not None else "before anything was logged"
    last = status.at_work or ((status.progress,) if status.progress else ())
    at = f" in {listed([f'{one.stage} after iteration {one.iter}' for one in last])}" if last else ""
    advice = "the same `stagerun run` resumes"
    if status.stuck:
        advice = f"the last {LIMIT} runs made no progress, so `stagerun run` asks for --retry"
    match status.state:
        case "starting":
            return f"starting, nothing logged yet: {status.holder}"
        case "running":
            return f"running: {status.holder}"
        case "finished":
            return f"finished {when}{left_out(status.not_chosen)}"
        case "stopped":
            why = f" ({status.reason})" if status.reason else ""
            return f"stopped {when}{at}{why}, everything is saved: {advice}"
        case "failed":
            why = status.reason.partition("\n")[0]
            text = f"ended with exit code {status.exit_code} {when}{at}{f': {why}' if why else ''}"
            return f"{text}; {advice}" if status.stuck or status.exit_code in WORTH_ANOTHER_START else text
        case "killed":
            return f"killed, or ended without a word, {when}{at}: {advice}"
        case "elsewhere":
            beat = f" (beat {status.holder.beat})" if status.holder and status.holder.beat is not None else ""
            return f"no word of an end from {status.holder}{beat}, which this machine can't see; last logged {when}{at}; if it is dead, {advice}"
    return f"nothing has been run yet in {Path(status.out).absolute()}"
