"""The run, on one worker:

    until nothing remains:
        rank 0 decides from what is on disk what comes next (`next_step`)
        every rank does it: trains a stage, evaluates one, or evaluates an ensemble

Every worker runs this same code, on its share of each batch. "Collective" marks a function that all ranks call together: each waits in it
for the others, so a branch around one goes the same way on all ranks. Only rank 0 has a `keeper`, which reads and writes the output
folder; the other ranks receive its decisions.

A killed run leaves complete snapshots and results, and a later run relies on nothing else. It decides from them as this one does before each
stage, so resuming needs no special code.
"""

import time
from collections.abc import Generator, Iterator

import torch

from stagerun.base.events import Event, Note, Renamed, RunFinished, Stopped
from stagerun.engine.update import explained
from stagerun.plan import State
from stagerun.plan.counting import names_of
from stagerun.system.pulse import Section
from stagerun.train.agreement import anyone, hosts_of, only_here, rank0, require_same_schedule
from stagerun.train.context import Context, StageRun
from stagerun.train.ensembling import test_ensemble
from stagerun.train.environment import other_machines
from stagerun.train.finish import finish_stage
from stagerun.train.images import Images
from stagerun.train.keeper import run_started
from stagerun.train.next_step import Step, evaluated_again, next_step, promised, was_set_aside
from stagerun.train.restore import restored
from stagerun.train.stage import train_stage


def run(context: Context) -> Iterator[Event]:
    """Run what is not yet done. Collective. `context.keeper` is open on rank 0, and None on the others. Ends after Stopped or
    RunFinished.

    Long operations poll `context.stop`; with a grace period, an iteration that can't be finished in time is abandoned. A replay (of
    `method: ASYNC`) ends with its record. ResumeRefused if `context.exact` demands bits that can't be promised.

    If one rank raises an error, the others raise ToldByAnother, or PeerError if it could not tell them.
    """
    began, comm, keeper, trained = time.monotonic(), context.comm, context.keeper, False
    require_same_schedule(comm, context.world, context.schedule)
    context.others = other_machines(comm, context.device, context.schedule.determinism)
    if keeper is not None:
        context.schedule = keeper.schedule  # it knows the images, which only rank 0 has looked at: it plans and writes
    context.images = Images(context.schedule, context.device)
    yield from _opening(context)
    while True:
        comm.pulse.enter(Section.START)
        step, notes = next_step(context)
        yield from notes
        if step is None:
            break
        why_stop = "asked to stop" if anyone(comm, context.stopping.asked) else ""
        if not why_stop and not context.images.looked_at:
            why_stop, plan_again = yield from _open_images(context)
            if plan_again:
                continue
        if why_stop:
            stage, iter = step.begins_at
            yield Stopped(stage=stage, iter=iter, reason=why_stop)
            return
        trained = True
        for event in _do(context, step):
            yield event
            if isinstance(event, Stopped):
                return
    not_chosen = keeper.not_chosen() if keeper is not None else ()
    if keeper is not None and context.replay is not None:  # a record may end before the schedule
        not_chosen += tuple(dict.fromkeys(planned.stage.name for planned in keeper.plan().work))
    yield RunFinished(trained=trained, seconds=time.monotonic() - began, not_chosen=not_chosen)


def _do(context: Context, step: Step) -> Iterator[Event]:
    """Train a stage to its end, or evaluate a trained one. Collective; the last event may be Stopped."""
    if not isinstance(step, StageRun):
        if context.keeper is not None and (note := promised(context, step)):
            yield note
        yield from test_ensemble(step)
        return
    planned = step.planned
    # A GPU may be too small even for the weights.
    with explained(step.stage.solver.device_batch_size):
        if planned.state is not State.DONE:
            yield from train_stage(step)
            return
        if context.keeper is not None:
            again, note = evaluated_again(context, planned), promised(context, step)
            if again:
                yield again
            if note and (note.warning or not again):
                yield note
        yield from finish_stage(step, restored(step), planned.end.name if planned.end is not None else "")


def _open_images(context: Context) -> Generator[Note, None, tuple[str, bool]]:
    """Import images that are still folders, copy them to scratch disks, and open them. Collective. Return the reason to stop ('' to
    continue), and whether to plan again, because the images differ from those that rank 0 planned with."""
    images, comm, world, keeper = context.images, context.comm, context.world, context.keeper
    if (yield from images.imported(comm, context.stop)):
        return "asked to stop while the images were imported; the next run resumes the import", False
    # The first look saw only names and sizes. Another run may have imported the folders after rank 0's first look.
    if images.imports and rank0(comm, lambda: keeper is not None and keeper.look_at_images()):
        if keeper is not None:
            context.schedule = keeper.schedule
        return "", True
    if (yield from images.open(comm, world, context.stop)):
        return "asked to stop while the images were copied; the next run resumes the copy", False
    images.remove_others(comm, world)
    images.preflight(comm)
    return "", False


def _opening(context: Context) -> Iterator[Event]:
    """Report location, remaining work, and state of the output folder. Collective."""
    comm, keeper = context.comm, context.keeper
    hosts = tuple(hosts_of(comm))
    yield run_started(
        context.schedule,
        out=context.out,
        workers=comm.size,
        device=str(context.device),
        threads=torch.get_num_threads(),
        iterations_left=rank0(comm, lambda: keeper.plan().iterations_left if keeper is not None else 0),
        hosts=hosts,
        attempt=keeper.attempt if keeper is not None else 0,
        rest=context.rest,
    )
    if context.placed is not None:
        yield context.placed
    text = only_here(comm, hosts, context.out)
    if keeper is None:
        return
    if text:
        yield Note(text=text, warning=True)
    taken = names_of(keeper.inventory())
    for name in dict.fromkeys(taken.values()):
        yield Renamed(stage=name, snapshots=tuple(snapshot for snapshot, stage in taken.items() if stage == name))
    for name in keeper.harmed:
        yield was_set_aside(name)
    for name in keeper.inventory().damaged:
        yield Note(text=f"snapshot {name} is damaged and is passed over", warning=True)
