"""One worker of `stagerun run`, from its start to its exit code."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from stagerun.base.events import Event
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.watch.worker import Monitored
from stagerun.system.imports import with_imports
from stagerun.system.world import World
from stagerun.train.agreement import rank0
from stagerun.train.context import Context, Stopping
from stagerun.train.hooks.profile import Profile
from stagerun.train.join import join, load_everywhere, place
from stagerun.train.options import Cut, RunOptions
from stagerun.train.run import run
from stagerun.train.sinks import Output, exit_code

PROFILED = 10  # iterations of --profile


def train(
    options: RunOptions,
    world: World,
    stop: StopRequest,
    watch: Monitored | None,
    cut: Cut | None = None,
) -> int:
    """Join the other workers, read the schedule as they do, and run it; return the exit code. `cut` makes the run short, to try
    something."""
    device, comm = join(world, options.threads, stop, watch, patient=True)
    schedule = load_everywhere(options.folder, options.overrides, comm, load if cut is None else cut.read)
    placed = place(world, comm, watch) if options.bind == "numa" else None
    limit_reached = False
    context = Context(
        schedule if cut is None else cut.schedule(schedule),
        "",
        comm,
        world,
        device,
        None,
        lambda: limit_reached or stop(),
        stopping=Stopping(stop.left),
        watch=watch,
        final_test_iter=None if cut is None else cut.final_test_iter,
        settle=stop.settle,
        placed=placed,
    )
    last: Event | None = None
    for last in logged_run(options, context):
        limit_reached = cut is not None and cut.until(last)
    comm.close()
    return exit_code(None, last)


def logged_run(options: RunOptions, context: Context) -> Iterator[Event]:
    """Run the schedule, with the events on the screen and in the logs of the output folder, which rank 0 holds until the last event or an
    error. Collective."""
    out, comm = options.output(context.schedule), context.comm
    context.schedule, context.out, context.exact = with_imports(context.schedule, out), str(out), options.exact
    context.replay = Path(options.replay).resolve() if options.replay is not None else None
    context.rest = (options.parallel or 0) > 1
    with ExitStack() as stack:
        output = Output(context, stack)
        rank0(comm, lambda: output.open(options))
        profile = context.profile = Profile(options.profile, PROFILED, comm) if options.profile is not None else None
        for event in output.with_failure(run(context)):
            output.show(event)
            yield event
        if profile is not None and not profile.over:
            note = profile.finish()
            if note.text and output.sinks:
                output.sinks[0](note)  # on the screen alone
