"""The run: rank 0 looks at what is on disk and says what comes next, every rank does it, until nothing is left.

The plan is made anew before each stage by the same pure function, from what is on disk then. So going on after a kill is not
a path of its own: it is how every stage starts.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch

import stagerun
from stagerun.comm import Comm
from stagerun.engine.update import explained
from stagerun.errors import ExitCode, ResumeRefused
from stagerun.events import Event, Note, RunFinished, RunStarted, Stopped
from stagerun.plan import Plan, PlannedStage, State
from stagerun.recipe import Schedule
from stagerun.runner import results
from stagerun.runner.finish import finish_stage
from stagerun.runner.images import Images
from stagerun.runner.keeper import Keeper
from stagerun.runner.stage import train_stage
from stagerun.runner.start import StageRun, restored
from stagerun.runner.together import ToldByAnother, everyone, rank0
from stagerun.spec import canonical
from stagerun.world import World


@dataclass(frozen=True, slots=True)
class Step:
    """What comes next. `files` are the start snapshot's, on rank 0 alone."""

    planned: PlannedStage
    number: int
    iterations_left: int
    files: dict[str, bytes] | None


def run(
    schedule: Schedule,
    out: str,
    comm: Comm,
    world: World,
    device: torch.device,
    keeper: Keeper | None,
    stop: Callable[[], bool],
    final_test_iter: int | None = None,
) -> Iterator[Event]:
    """Runs what is not yet done. Collective; `keeper` (opened) on rank 0 alone. Ends after Stopped or RunFinished.

    `final_test_iter` cuts the evaluation after a stage short, which otherwise covers every image: for rehearsals.

    Errors concern all ranks: one of them raises the error, the others ToldByAnother or PeerError.
    """
    begun = time.monotonic()
    _same_schedule(comm, schedule)
    with closing(Images(schedule, device)) as images:
        trained = yield from _walk(schedule, out, comm, world, device, keeper, stop, final_test_iter, images)
    if trained is not None:
        yield RunFinished(trained=trained, seconds=time.monotonic() - begun)


def _walk(
    schedule: Schedule,
    out: str,
    comm: Comm,
    world: World,
    device: torch.device,
    keeper: Keeper | None,
    stop: Callable[[], bool],
    final_test_iter: int | None,
    images: Images,
) -> Generator[Event, None, bool | None]:
    """Whether there was anything to do; None after Stopped."""
    opened = False
    yield from _opening(schedule, out, comm, device, keeper)
    for name in keeper.inventory().damaged if keeper is not None else ():
        yield Note(text=f"snapshot {name} is damaged and is passed over", warning=True)
    while True:
        step, notes = _next(schedule, comm, keeper)
        yield from notes
        if step is None:
            break
        if not opened:
            stopped = yield from images.open(comm, world, stop)
            if stopped:
                reason = "asked to stop while the images were copied; the copy goes on where it was"
                yield Stopped(stage=step.planned.stage.name, iter=step.planned.iter, reason=reason)
                return None
            everyone(comm, images.preflight)
            opened = True
        stage_run = StageRun(
            schedule,
            step.planned,
            step.number,
            comm,
            device,
            images,
            stop,
            keeper,
            step.iterations_left,
            step.files,
            final_test_iter,
        )
        done = step.planned.state is State.DONE
        # A GPU may be too small for the weights alone, too.
        with explained(step.planned.stage.solver.device_batch_size):
            events = finish_stage(stage_run, restored(stage_run)) if done else train_stage(stage_run)
            for event in events:
                yield event
                if isinstance(event, Stopped):
                    return None
    return opened


def _opening(schedule: Schedule, out: str, comm: Comm, device: torch.device, keeper: Keeper | None) -> Iterator[Event]:
    def left() -> int:
        assert keeper is not None
        return keeper.plan().iterations_left

    yield RunStarted(
        schedule=schedule.name,
        out=out,
        workers=comm.size,
        device=str(device),
        threads=torch.get_num_threads(),
        stages=tuple(stage.name for stage in schedule.stages),
        iterations=sum(stage.solver.max_iter for stage in schedule.stages),
        iterations_left=int(str(rank0(comm, left))),
        version=stagerun.__version__,
    )


def _next(schedule: Schedule, comm: Comm, keeper: Keeper | None) -> tuple[Step | None, list[Note]]:
    """Rank 0's decision, on every rank. Collective.

    A start snapshot that turns out damaged is set aside, and the plan is made again without it: training then goes on from
    the one before, at the cost of the iterations in between.
    """
    found: list[Step | None] = []
    notes: list[Note] = []

    def decide() -> dict[str, object] | None:
        assert keeper is not None
        while True:
            plan = keeper.plan()
            waiting = results.unfinished(plan, keeper.out)
            planned = waiting[0] if waiting else plan.next
            if planned is None:
                found.append(None)
                return None
            source = planned.end if planned.state is State.DONE else planned.start
            files = keeper.read(source) if source is not None else None
            if source is None or files is not None:
                found.append(Step(planned, _number(plan, planned), plan.iterations_left, files))
                return {
                    "stage": planned.stage.name,
                    "state": planned.state.value,
                    "iter": planned.iter,
                    "position": planned.position,
                    "number": _number(plan, planned),
                }
            notes.append(
                Note(text=f"snapshot {source.name} is damaged and was set aside as .bad-{source.name}", warning=True)
            )

    answer = rank0(comm, decide)
    if comm.rank == 0:
        return found[-1], notes
    if answer is None:
        return None, []
    assert isinstance(answer, dict)
    planned = PlannedStage(
        stage=schedule.stage(answer["stage"]),
        state=State(answer["state"]),
        iter=answer["iter"],
        position=answer["position"],
    )
    return Step(planned, answer["number"], 0, None), []


def _number(plan: Plan, planned: PlannedStage) -> int:
    return plan.stages.index(planned) + 1


def _without_paths(schedule: Schedule) -> Schedule:
    """The schedule without where this node has its files."""
    data = schedule.data
    val = replace(data.val, path="") if data.val else None
    return replace(schedule, data=replace(data, train=replace(data.train, path=""), val=val))


def _same_schedule(comm: Comm, schedule: Schedule) -> None:
    """ResumeRefused, on rank 0, naming the ranks whose solver files say something else than its own. Collective.

    Not only what training depends on is compared: ranks that evaluate at other iterations would wait for each other for ever.
    """
    texts = comm.gather_bytes(canonical(_without_paths(schedule)).encode())
    other = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if other and comm.rank != 0:
        raise ToldByAnother(ExitCode.RESUME_REFUSED)
    if other:
        raise ResumeRefused(
            f"the solver files of rank{'s' if len(other) > 1 else ''} {', '.join(map(str, other))} differ from rank 0's",
            "copy the schedule's folder to every node",
        )
