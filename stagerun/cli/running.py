"""`stagerun run`: what can go wrong is found here, in the first second and without torch; then workers are started, or
this process is one."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stagerun import signals, store
from stagerun.cli.commands_run import RunOptions
from stagerun.cli.ending import over_live_line, tell
from stagerun.cli.host_options import HostOptions
from stagerun.cli.hours import find_hours
from stagerun.cli.logs import LOGS, SCREENS, Opened, Sink, in_format, parents, require_evaluation, require_packages
from stagerun.cli.options import arguments
from stagerun.cli.output import DISK
from stagerun.cli.placing import Wish, place
from stagerun.cli.shared_options import CORES, limits, output_folder
from stagerun.cli.workers import Job, check_workers, devices, join, joined, load_everywhere, say, start, work
from stagerun.data.fingerprint import with_sets
from stagerun.errors import ExitCode, FolderInUseError, PeerError, StagerunError, UsageError
from stagerun.events import Event, Failed, Note, RunFinished, Stopped
from stagerun.launch import StopRequest
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.plan.ensembles import ensembles_text
from stagerun.plan.hours_text import render_hours
from stagerun.plan.render import going_on, render_text
from stagerun.pulse import Section
from stagerun.recipe import Schedule
from stagerun.report.console import finished_line
from stagerun.report.jsonl import JsonLines
from stagerun.report.table import ensembles_table, results_table
from stagerun.report.whole_file import require_writable
from stagerun.runner import results
from stagerun.runner.restarts import require_progress, standing
from stagerun.snapshots import Inventory
from stagerun.spec import load
from stagerun.watch.worker import Monitored, monitored
from stagerun.world import World

PROFILED = 10  # iterations of --profile


def run_command(options: RunOptions, hosts: HostOptions | None = None) -> int:
    """The exit code. `hosts`: what --hosts and the options beside it say."""
    over_live_line()
    require_packages(options.log)
    limits(options.timeouts)  # a mistake in it, too
    if options.profile is None and options.profile_iterations is not None:
        raise UsageError("--profile-iterations without --profile", "`--profile FILE` says where to write them")
    if options.comm_cores is not None and options.bind != CORES:
        hint = "it says how many cores of a worker are set apart"
        raise UsageError(f"--comm-cores {options.comm_cores} without --bind cores", hint)
    store.planned_fault()  # a mistake in it is reported before anything is started
    if hosts is not None:
        return _on_hosts(options, hosts)
    return work(job_of(options), grace=options.grace_s) if joined(options.nproc) else _start(options)


@dataclass(frozen=True, slots=True)
class Cut:
    """What makes a run short, to try something: what becomes of the schedule in the files, and batches of the evaluation after a
    stage."""

    schedule: Callable[[Schedule], Schedule]
    final_test_iter: int


def job_of(options: RunOptions, cut: Cut | None = None) -> Job:
    """What a worker of the run does."""
    return lambda world, stop: _train(options, world, stop, cut)


# -- the process that a person started


def _start(options: RunOptions) -> int:
    schedule = load(options.folder, options.overrides)
    nproc = options.nproc or devices(schedule)
    done = look_first(options, schedule, nproc)
    if done is not None:
        return done
    return start(options.arguments(), nproc, options.threads, job_of(options), grace=options.grace_s)


def _on_hosts(options: RunOptions, hosts: HostOptions) -> int:
    # Only here: it compares what data hosts see, and so loads numpy, whose threads others start with signals held.
    from stagerun.cli.hosting import Task, on_hosts
    from stagerun.launch.life import Orders

    schedule = load(options.folder, options.overrides)
    require_evaluation(options.log, schedule)
    watched = limits(options.timeouts) is not None
    bundle, folder = hosts.bundle(options.folder)
    options = replace(options, folder=folder)
    question = {"folder": folder, "overrides": options.overrides, "out": options.out}
    task = Task(
        Orders(tuple(options.arguments()), options.threads, options.grace_s, watched=watched),
        question,
        lambda size: check_workers(schedule, size),
        {"options": asdict(options)},
        bundle,
        again=() if options.retry else ("--retry",),
    )
    return on_hosts(task, hosts)


def look_first(options: RunOptions, schedule: Schedule, size: int) -> ExitCode | None:
    """What `run` finds and prints where rank 0 will be, before `size` workers are started; the exit code where there is nothing to do.
    What is wrong is raised."""
    require_evaluation(options.log, schedule)
    out = output_folder(schedule.name, options.out)
    schedule = with_sets(schedule)
    plan, found = look(schedule, out, options)
    _report_idle_redo(plan, options)
    if results.nothing_to_do(plan, out):
        left = tuple(s.stage.name for s in plan.left_out if s.state is State.NOT_CHOSEN)
        finished = RunFinished(trained=False, seconds=0.0, not_chosen=left)
        say(in_format(options.log_format, finished_line(finished)))
        say(in_format(options.log_format, _table(plan, out)))
        return ExitCode.DONE
    if not options.retry:
        require_progress(DISK, out, standing(DISK, out, schedule, found))
    check_workers(schedule, size)
    with signals.held():
        from stagerun.runner.images import preflight

    preflight(schedule)
    together = ensembles_text(results.planned_ensembles(plan, out))
    text = _shortly(plan, out, options) or render_text(plan, beside=[together])
    say(in_format(options.log_format, text + "\n"))
    return None


def _shortly(plan: Plan, out: Path, options: RunOptions) -> str:
    """Of a run that goes on; '' of one that starts."""
    if not (text := going_on(plan)):
        return ""
    hours = find_hours(plan, out, None)
    left = render_hours(plan, hours).partition("\n")[0] if hours else ""
    same = arguments(options, "folder", "overrides", "out", "redo", "keep", "only", "until")
    text += f", {left}" if left.startswith("about") else ""
    return f"{text}\n`{shlex.join(['stagerun', 'plan', *same])}` shows the full plan"


def look(schedule: Schedule, out: Path, options: RunOptions) -> tuple[Plan, Inventory]:
    """The plan, and the proof that the folder can be written and that no lock says it is held. A run on another host, of which only
    a lease is seen, is waited for by the worker."""
    store.prepare(DISK, out)
    with store.Lock(out, optional=True):
        found = store.inventory(DISK, out)
        plan = make_plan(schedule, found, options.redo, options.keep, options.only, options.until)
    require_fresh(plan)
    return plan, found


def _report_idle_redo(plan: Plan, options: RunOptions) -> None:
    for name in options.redo:
        these = [s for s in plan.stages if name in (s.stage.name, s.stage.group)]
        if not any(s.again or any(s.stage.name in lost.named for lost in plan.lost) for s in these):
            text = f"note: stage `{name}` is not stale, so --redo has nothing to do there"
            say(in_format(options.log_format, text))


def _table(plan: Plan, out: Path) -> str:
    stages = results_table(results.results(plan, out), parents(plan))
    together = ensembles_table(results.ensembles(plan, out))
    return f"{stages}\n\n{together}" if together else stages


# -- a worker


def _train(options: RunOptions, world: World, stop: StopRequest, cut: Cut | None) -> int:
    def speak(text: str) -> None:
        tell(f"rank {world.rank}: {text}" if world.rank else text)

    with monitored(world, limits(options.timeouts), speak) as watch:
        try:
            return _train_monitored(options, world, stop, cut, watch)
        except PeerError as error:
            if watch is not None:
                watch.explain(error)
            raise


def _train_monitored(
    options: RunOptions, world: World, stop: StopRequest, cut: Cut | None, watch: Monitored | None
) -> int:
    from stagerun.runner.keeper import Keeper
    from stagerun.runner.profiling import Profile
    from stagerun.runner.stopping import Grace
    from stagerun.runner.together import rank0
    from stagerun.runner.walk import run

    device, comm = join(world, options.threads, stop, watch, patient=True)
    schedule = load_everywhere(options.folder, options.overrides, comm)
    placed = place(world, device, comm, Wish(options.bind, options.comm_cores, options.threads), watch)
    if cut is not None:
        schedule = cut.schedule(schedule)
    out = output_folder(schedule.name, options.out)
    keeper = None
    if comm.rank == 0:
        choice = (options.redo, options.keep, options.only, options.until)
        keeper = Keeper(schedule, out, *choice, retry=options.retry, say=tell, stop=stop)
    with ExitStack() as stack:
        sinks: list[Sink] = []
        last: Event | None = None

        def open_folder() -> None:
            assert keeper is not None
            if options.profile is not None:
                require_writable(options.profile)
            stack.push(lambda kind, error, trace: keeper.close(_code(error, last)))
            keeper.open()
            if watch is not None:
                watch.log(out / "log.jsonl")
            plan = keeper.plan()
            before = results.results(plan, out)
            screen = SCREENS[options.log_format](plan, before, results.ensembles(plan, out))
            stack.callback(comm.pulse.prints, False)
            sinks.append(stack.enter_context(screen))
            stack.callback(comm.pulse.prints, True)  # its end prints, too
            sinks.append(stack.enter_context(JsonLines(out / "log.jsonl", screen.say)))
            require_evaluation(options.log, schedule)
            opened = Opened(plan, out, before, screen.say)
            for name in dict.fromkeys(options.log):
                sinks.append(stack.enter_context(LOGS[name].make(opened)))

        rank0(comm, open_folder)
        final_test_iter = cut.final_test_iter if cut else None
        grace = Grace(options.grace_s, stop.left)
        profile = None
        if options.profile is not None:
            profile = Profile(options.profile, options.profile_iterations or PROFILED, comm)
        events = run(
            schedule, str(out), comm, world, device, keeper, stop, final_test_iter, grace, options.exact, profile
        )
        if placed is not None:
            events = after_first(events, placed)
        for event in told(events, watch) if sinks else events:
            # A monitor's word is the last that the user sees. What is still trained after it may be saved, so it is logged.
            for sink in sinks if watch is None or not watch.verdict else sinks[1:]:
                with comm.pulse.printing() if sink is sinks[0] else comm.pulse.section(Section.SAVE):
                    sink(event)
            last = event
        if profile is not None and not profile.over and (note := profile.finish()).text and sinks:
            sinks[0](note)
    comm.close()
    return _code(None, last)


def _code(error: BaseException | None, last: Event | None) -> int:
    """What the run ends with: `error`, or else its last event."""
    if error is not None:
        return error.exit_code if isinstance(error, StagerunError) else ExitCode.BUG
    return ExitCode.SAVED if isinstance(last, Stopped) else ExitCode.DONE


def after_first(events: Iterator[Event], note: Note) -> Iterator[Event]:
    """The events, and `note` after the first, which says that the run starts."""
    for number, event in enumerate(events):
        yield event
        if number == 0:
            yield note


def told(events: Iterator[Event], watch: Monitored | None = None) -> Iterator[Event]:
    """The events, and Failed before an error goes on its way: who looks in the morning finds it in the log. Where a monitor ends the
    job, the monitor logs why, and errors only follow from it."""
    try:
        yield from events
    except FolderInUseError:  # the log is that of the run which has taken over
        raise
    except Exception as error:
        if watch is not None and isinstance(error, PeerError):
            watch.explain(error)
        if watch is None or not watch.verdict:
            text = error.render() if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
            yield Failed(code=int(_code(error, None)), text=text)
        raise
