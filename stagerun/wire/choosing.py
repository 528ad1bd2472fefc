"""`method: AUTO` of `compress_param`: chooses how a stage's gradients are sent, once, before its first update.

The choice is in OUT/choices, for a run that is killed before its first snapshot and for retrained stretches, and in each snapshot.
"""

import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, Stopped
from stagerun.comm import Reducer, gather_json, runs_of
from stagerun.engine.device import synchronize
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import update
from stagerun.models import build
from stagerun.schedule import Knobs
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, rank0
from stagerun.train.progress import progress_of
from stagerun.train.resident import training_batches
from stagerun.train.stage_loop import arithmetic_of
from stagerun.wire.rules import DENSE, Chosen, applied, called, grouped, identity_of, read_chosen, write_chosen

if TYPE_CHECKING:
    from stagerun.train.context import StageRun

# Dense gradients stay unless a method takes less than this share: a few steps are not more precise.
CLEARLY = 0.97


def resolved(
    run: "StageRun", state: TrainState, make: Callable[[TrainState, str], Reducer]
) -> Generator[Event, None, bool]:
    """Set `run.choice` to the methods that AUTO stands for; return False after a Stopped. `make` returns the reducer for a trial's state and a
    method. Collective. ResumeRefused for a snapshot without a choice that `compress_param` allows."""
    how, comm = run.stage.solver.compress, run.worker.comm
    assert how is not None
    why = "as this run chose before"
    if not run.choice:
        run.choice, why = rank0(comm, lambda: _stored(run, state))
    if run.choice:
        if run.rollbacks is None:
            yield _event(run, state, why)
        return True
    seconds: dict[str, float] = {}
    if comm.size == 1:
        run.choice, why = {"*": DENSE}, "one worker sends nothing"
    else:
        if run.is_piece:
            text = f"the choice of stage `{run.stage.name}` is missing in the output folder: it is made again, and the bits may differ"
            yield Note(text=text, warning=True)
        names, began = [DENSE, *(method.value for method in how.allow)], time.monotonic()
        text = f"timing steps with {', '.join(map(called, names))} gradients, in turn"
        yield Note(text=f"{run.stage.name}: {text}")
        device = run.worker.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            trial = everyone(comm, lambda: Trial(run, state))
            taken = race(run, trial, {name: make(trial.state, name) for name in names})
        comm.pulse.enter(Section.START)  # again
        if not taken:
            reason = "asked to stop while it chose how gradients are sent"
            yield Stopped(stage=run.stage.name, iter=state.iter, reason=reason)
            return False
        best, why = decided(taken)
        run.choice = {"*": best}
        seconds = {each: statistics.median(times) for each, times in taken.items()}
        why = f"{why}; it took {time.monotonic() - began:.1f} s to choose"
    chosen = Chosen(
        stage=run.stage.name,
        identity=identity_of(run.stage),
        parent=run.parent_id,
        workers=comm.size,
        choice=dict(run.choice),
        seconds=seconds,
    )

    def write() -> None:
        keeper = run.worker.keeper
        assert keeper is not None
        keeper.require_held()
        write_chosen(keeper.disk, keeper.out, chosen)

    rank0(comm, write)  # before the first update
    yield _event(run, state, why, seconds)
    return True


def _stored(run: "StageRun", state: TrainState) -> tuple[dict[str, str], str]:
    """Return the choice in the snapshot or the output folder, {} if missing, and its origin, on rank 0."""
    how, names = run.stage.solver.compress, {"*", *(p.name for p in state.solver.parameters)}
    assert how is not None

    def fits(choice: Mapping[str, str]) -> bool:
        with suppress(ValueError):
            applied(how, choice)
            return choice.keys() <= names
        return False

    if run.resumes:
        choice = progress_of(run.files).choice if run.files is not None else {}
        if not fits(choice):
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what `method: AUTO` chose for this network",
                "take `--redo` for the stage, or another --out",
            )
        return choice, "as the snapshot has it"
    assert run.worker.keeper is not None
    chosen = read_chosen(run.worker.keeper.out, run.stage)
    # A retrained stretch must have the same bits. Before anything is trained, other workers may choose differently.
    same = chosen is not None and (run.is_piece or (chosen.workers == run.worker.comm.size and not run.planned.again))
    if chosen is None or not same or chosen.parent != run.parent_id or not fits(chosen.choice):
        return {}, ""
    return chosen.choice, "as chosen before, in OUT/choices"


def decided(taken: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """Return the method to take, and why. `taken`: seconds of steps by turn, so that steps of a turn make pairs."""
    middle = {name: statistics.median(times) for name, times in taken.items()}
    best = min(middle, key=lambda name: middle[name])
    if best == DENSE:
        return best, "the fastest of all timed"
    ratios = sorted(a / b for a, b in zip(taken[best], taken[DENSE], strict=False))
    ratio, high = statistics.median(ratios), ratios[(3 * len(ratios)) // 4]
    if ratio > CLEARLY or high >= 1:
        return DENSE, f"nothing is clearly faster: {best} takes {ratio:.2f} times as long"
    return best, f"it takes {ratio:.2f} times as long as dense"


def _event(
    run: "StageRun", state: TrainState, why: str, seconds: Mapping[str, float] | None = None
) -> CompressionChosen:
    methods = grouped({p.name: p.tensor.numel() for p in state.solver.parameters}, run.choice)
    tried = tuple((called(name), taken) for name, taken in (seconds or {}).items())
    return CompressionChosen(stage=run.stage.name, methods=tuple(methods), why=why, tried=tried)


# -- timing


STEPS = 6  # timed steps of each method, after a first one that allocates memory
_LONG = 120.0  # seconds, after which fewer steps are enough


class Trial:
    """Steps of a stage on a copy of its state; all logical workers use the same batch."""

    def __init__(self, run: "StageRun", state: TrainState) -> None:
        worker, solver = run.worker, run.stage.solver
        self.workers, self.device = runs_of(solver.logical_workers, worker.comm.size)[worker.comm.rank], worker.device
        size, start = solver.device_batch_size, run.planned.position + run.planned.skipped
        first = start + state.iter * solver.batch_size + self.workers.start * size
        with training_batches(run, None, [(first, size)]) as batches:
            self.batch = deepcopy(next(batches))  # its memory is the loader's
        teacher = worker.schedule.teacher_model(run.stage)
        self.how = arithmetic_of(run.stage, worker.device, teacher=teacher)
        model = build(run.stage.model)
        model.load_state_dict(state.model.state_dict())
        # Compiled code would leave less time to hide the sending.
        self.solver = replace(solver, compile=False, ema_decay=None)
        self.state = make_state(model, self.solver, worker.device)

    def step(self, reducer: Reducer) -> float:
        """Return the seconds of a step. Collective, if the reducer is."""
        pieces = ((worker, self.batch, worker == self.workers[-1]) for worker in self.workers)
        began = time.perf_counter()
        update(self.state, pieces, Knobs(0.0, self.solver.momentum, 0.0), reducer, self.how, lambda: False)
        synchronize(self.device)
        return time.perf_counter() - began


def race(run: "StageRun", trial: Trial, reducers: Mapping[str, Reducer]) -> dict[str, list[float]]:
    """Return seconds of the slowest worker in each timed step, by method; {} after a request to stop. Collective."""
    comm, began, names = run.worker.comm, time.monotonic(), list(reducers)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(STEPS + 1):
        seconds = {}
        for name in names if turn % 2 else names[::-1]:
            comm.barrier()
            seconds[name] = trial.step(reducers[name])
        stop = run.worker.stop() or run.worker.stopping.asked
        answers = gather_json(comm, [seconds, stop, time.monotonic() - began])
        if any(stops for _, stops, _ in answers):
            return {}
        if turn:
            for name in names:
                taken[name].append(max(times[name] for times, _, _ in answers))
            if answers[0][2] > _LONG:
                break
    return taken
