"""A stage with `method: ASYNC` on one rank: the order of pushes that it goes by, where there is one, and what was recorded of it so far."""

from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.engine.asynchronous.record import Record, record_of
from stagerun.engine.asynchronous.training import Asynchronous
from stagerun.engine.loop import StageLoop
from stagerun.engine.state import TrainState
from stagerun.train.agreement import rank0
from stagerun.train.progress import ARRIVALS
from stagerun.train.stored import most_arrivals, most_bytes
from stagerun.train.worker import StageRun


def asynchronous(run: StageRun, loop: StageLoop, state: TrainState) -> Asynchronous:
    """The replicas and servers of a stage with `ASYNC`. Collective."""
    comm = run.worker.comm
    own: list[tuple[Record, bytes | None]] = []

    def known_order() -> bool:
        known = _recorded(run) if run.replays else None
        own.append((_record(run, state, known), known))
        return known is not None

    goes_by = rank0(comm, known_order)
    record, known = own[0] if own else (Record(), None)
    recorded = record_of(comm.broadcast_bytes(known)) if goes_by else None
    return Asynchronous(loop, state, run.stage.solver, run.worker.schedule.determinism, comm, record, recorded)


def _recorded(run: StageRun) -> bytes:
    """The order to go by, on rank 0: that of the replay, or, of a piece, that in which the stage itself went on from there. ResumeRefused
    where the stage had no state of its own."""
    worker, planned = run.worker, run.planned
    if worker.replaying is not None:
        return worker.replaying.records[run.stage.name].arrivals
    assert worker.keeper is not None
    source = planned.like
    if source is not None:
        most = most_bytes(run.stage.model, arrivals=most_arrivals(run.stage.solver, source.iter))
    files = worker.keeper.read(source, most) if source is not None else None
    known = files.get(ARRIVALS) if files is not None else None
    ends = [leg.last for leg in _read(run, known).legs] if known is not None else []
    if known is None or planned.until not in ends:
        near = min(ends, key=lambda at: abs(at - (planned.until or 0)), default=None)
        raise ResumeRefused(
            f"stage `{run.stage.name}` pushed without waiting (`method: ASYNC`), and had no one state after {planned.until} iterations",
            (
                f"start from {run.stage.name}@{near}, where all had met"
                if near
                else "no snapshot of it has its order of pushes"
            )
            + f"; or train it anew with `--redo {run.stage.name}`",
        )
    return known


def _record(run: StageRun, state: TrainState, known: bytes | None) -> Record:
    """On rank 0, what the stage has recorded so far, which is the beginning of the record `known` that is replayed. ResumeRefused, UsageError."""
    name = run.stage.name
    record = _read(run, state.arrivals) if state.arrivals is not None else Record()
    if record.last != state.iter:
        text = f"the order of pushes in stage `{name}` is known up to iteration {record.last}, and its snapshot is of {state.iter}"
        raise ResumeRefused(text, "take `--redo` for the stage, or another --out")
    if known is not None and _read(run, known).up_to(state.iter).legs != record.legs:
        if run.is_piece:
            text = f"snapshots of stage `{name}` have two orders of pushes up to iteration {state.iter}"
            raise ResumeRefused(text, f"take `--redo {name}`, which trains it anew")
        raise UsageError(
            f"--replay {run.worker.replay}: the replay's own folder has stage `{name}` up to iteration {state.iter}, in another order",
            "name another folder with --out",
        )
    return record


def _read(run: StageRun, data: bytes) -> Record:
    try:
        return record_of(data)
    except ValueError as error:
        text = f"the order of pushes in stage `{run.stage.name}` can't be read: {error}"
        raise ResumeRefused(text, "no run has written it; take `--redo` for the stage, or another --out") from error
