"""`method: AUTO` of `compress_param`: how a stage's gradients are sent, chosen once, before its first update, and kept from then on.

The choice is in OUT/choices, for a run that is killed before its first snapshot, and for stretches that are trained once more; and in
each snapshot. Real steps of dense gradients and of each allowed method are timed in turn, on this link and with this network.
"""

import statistics
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from stagerun.base.compression import Choice, applied
from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, Stopped
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Compression, Determinism, Method, Solver
from stagerun.base.text import duration, listed
from stagerun.comm import Comm, Reducer, gather_json, runs_of
from stagerun.engine.compression import reducer_of, residual_of
from stagerun.engine.device import synchronize
from stagerun.engine.feed import DeviceBatch
from stagerun.engine.images import Batch
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import Arithmetic, update
from stagerun.models import build
from stagerun.plan import State
from stagerun.system.pulse import Section
from stagerun.train.agreement import everyone, rank0
from stagerun.train.choices import DENSE, Chosen, grouped, identity_of, read_chosen, write_chosen
from stagerun.train.progress import progress_of
from stagerun.train.stage_start import arithmetic_of, parent_id
from stagerun.train.worker import StageRun

# Dense gradients stay unless a method takes so much less: what a few steps show is not surer.
CLEARLY = 0.97
STEPS = 6  # of each that are timed, after one that makes room for things
_LONG = 120.0  # seconds after which fewer are enough


@contextmanager
def unseen(comm: Comm) -> Iterator[None]:
    """What is sent within counts for no traffic, and shows in no profile."""
    sent, spans = comm.traffic.sent, comm.spans
    comm.spans = None
    try:
        yield
    finally:
        comm.traffic.sent, comm.spans = sent, spans


class Trial:
    """Steps of a stage on a copy of `state`, whose network is `model`, freshly made. `batch` is every logical worker's."""

    def __init__(
        self,
        model: nn.Module,
        state: TrainState,
        solver: Solver,
        determinism: Determinism,
        how: Arithmetic,
        batch: Batch,
        own: range,
    ) -> None:
        model.load_state_dict(state.model.state_dict())
        # What compiled code takes less, there is less of to hide the sending.
        self.solver = replace(solver, compile=False, ema_decay=None)
        self.state = make_state(model, self.solver, how.normalise.device)
        self.determinism, self.how, self.batch, self.own = determinism, how, batch, own
        self.knobs = Knobs(0.0, solver.momentum, 0.0)

    def step(self, reducer: Reducer) -> float:
        """Seconds of one. Collective, if the reducer is."""
        pieces = ((worker, self.batch, worker == self.own[-1]) for worker in self.own)
        began = time.perf_counter()
        update(self.state, pieces, self.knobs, reducer, self.how, lambda: False)
        synchronize(self.how.normalise.device)
        return time.perf_counter() - began

    def reducer(self, comm: Comm, compress: Compression) -> Reducer:
        """That of training, with a residual of its own."""
        solver = replace(self.solver, compress=replace(compress, start_iter=0))
        self.state.residual = residual_of(self.determinism, self.state, solver, comm)
        return reducer_of(self.determinism, self.state, solver, comm)


def resolved(run: StageRun, state: TrainState) -> Generator[Event, None, Compression | None]:
    """How the stage compresses its gradients, with what AUTO chooses in its place. Collective. Method AUTO after a Stopped.

    ResumeRefused for a snapshot without a choice, or with one that `compress_param` doesn't allow.
    """
    how = run.stage.solver.compress
    if how is None or how.method is not Method.AUTO:
        return how
    why = "as this run has chosen it before"
    if not run.choice:
        run.choice, why = rank0(run.worker.comm, lambda: _known(run, state, how))
    if run.choice:
        if run.rollbacks is None:
            yield CompressionChosen(stage=run.stage.name, methods=_groups(state, run.choice), why=why)
        return applied(how, run.choice)
    if run.worker.comm.size == 1:
        run.choice = {"*": DENSE}
        yield from _publish(run, state, {}, "one worker sends nothing")
        return applied(how, run.choice)
    if run.is_piece:
        text = f"what stage `{run.stage.name}` chose is not in the output folder any more: it is chosen anew, and the bits may be others"
        yield Note(text=text, warning=True)
    done = yield from _choose(run, state, how)
    return applied(how, run.choice) if done else how


def _known(run: StageRun, state: TrainState, how: Compression) -> tuple[dict[str, str], str]:
    """Rank 0's: what the snapshot or the output folder has, empty if there is nothing yet; and where it is from."""
    names = {"*", *(p.name for p in state.solver.parameters)}
    if run.planned.state is State.RESUME:
        choice = progress_of(run.files).choice if run.files is not None else {}
        try:
            applied(how, choice)
        except ValueError:
            choice = {}
        if not choice or not choice.keys() <= names:
            raise ResumeRefused(
                f"the snapshot of stage `{run.stage.name}` does not say what `method: AUTO` chose for this network",
                "take `--redo` for the stage, or another --out",
            )
        return choice, "as the snapshot has it"
    assert run.worker.keeper is not None
    chosen = read_chosen(run.worker.keeper.out, run.stage)
    # What is trained once more must have its bits. Where nothing is trained yet, other workers may choose otherwise.
    same = chosen is not None and (run.is_piece or (chosen.workers == run.worker.comm.size and not run.planned.again))
    if chosen is None or not same or chosen.parent != parent_id(run.planned) or not chosen.choice.keys() <= names:
        return {}, ""
    try:
        applied(how, chosen.choice)
    except ValueError:
        return {}, ""
    return chosen.choice, "as chosen before, in OUT/choices"


def _choose(run: StageRun, state: TrainState, how: Compression) -> Generator[Event, None, bool]:
    """Time the methods and publish the choice. Collective; False after a Stopped."""
    comm, name, began = run.worker.comm, run.stage.name, time.monotonic()
    names = [DENSE, *(method.value for method in how.allow)]
    yield Note(text=f"{name}: timing steps with {listed([called(each) for each in names])} gradients, in turn")
    with torch.random.fork_rng([run.worker.device] if run.worker.device.type == "cuda" else []), unseen(comm):
        trial = everyone(comm, lambda: _trial(run, state))
        taken = _race(run, trial, how, names)
    comm.pulse.enter(Section.START)  # it goes on
    if not taken:
        yield Stopped(stage=name, iter=state.iter, reason="asked to stop while it chose how gradients are sent")
        return False
    best, why = decided(taken)
    run.choice = {"*": best}
    seconds = {each: statistics.median(times) for each, times in taken.items()}
    yield from _publish(run, state, seconds, f"{why}; it took {duration(time.monotonic() - began, '.1f')} to choose")
    return True


def _race(run: StageRun, trial: Trial, how: Compression, names: Sequence[str]) -> dict[str, list[float]]:
    """Return seconds of the slowest worker in each timed step, by method; nothing where a rank is asked to stop. Collective."""
    comm, began = run.worker.comm, time.monotonic()
    reducers = {name: trial.reducer(comm, applied(how, {"*": name})) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(STEPS + 1):
        seconds = {}
        for name in names if turn % 2 else names[::-1]:
            comm.barrier()
            seconds[name] = trial.step(reducers[name])
        stop = run.worker.stop() or run.worker.stopping.asked
        answers = gather_json(comm, [seconds, stop, time.monotonic() - began])
        if any(asked for _, asked, _ in answers):
            return {}
        if turn:
            for name in names:
                taken[name].append(max(times[name] for times, _, _ in answers))
            if answers[0][2] > _LONG:
                break
    return taken


def decided(taken: Mapping[str, Sequence[float]]) -> tuple[str, str]:
    """Return the method to take, and why in words. `taken`: seconds of steps in turn, so that those of one turn make pairs."""
    middle = {name: statistics.median(times) for name, times in taken.items()}
    best = min(middle, key=lambda name: middle[name])
    if best == DENSE or DENSE not in taken:
        return best, "the fastest of those that were timed"
    ratios = sorted(a / b for a, b in zip(taken[best], taken[DENSE], strict=False))
    ratio, high = statistics.median(ratios), ratios[(3 * len(ratios)) // 4]
    if ratio > CLEARLY or high >= 1:
        return DENSE, f"nothing is clearly faster: {best} takes {ratio:.2f} times as long"
    return best, f"it takes {ratio:.2f} times as long as dense"


def called(method: str) -> str:
    return "dense" if method == DENSE else method


def _trial(run: StageRun, state: TrainState) -> Trial:
    solver = run.stage.solver
    own = runs_of(solver.logical_workers, run.worker.comm.size)[run.worker.comm.rank]
    start = run.planned.position + run.planned.skipped
    first = start + state.iter * solver.batch_size + own.start * solver.device_batch_size
    with run.worker.images.loader(run.stage, start).stream([(first, solver.device_batch_size)]) as batches:
        batch = next(run.worker.images.labelled(iter(batches), run.stage, run.stage.data.train))

        def placed(values: Any) -> Any:
            if values is None or isinstance(values, torch.Tensor):
                return values
            return torch.as_tensor(np.array(values)).to(run.worker.device)

        kept = DeviceBatch(
            images=placed(batch.images),
            labels=placed(batch.labels),
            positions=np.array(batch.positions),
            cutout=placed(batch.cutout),
            crop=placed(batch.crop),
        )
    arithmetic = arithmetic_of(
        run.stage.model, solver, run.worker.device, teacher=run.worker.schedule.teacher_model(run.stage)
    )
    model = build(run.stage.model)
    return Trial(model, state, solver, run.worker.schedule.determinism, arithmetic, kept, own)


def _publish(run: StageRun, state: TrainState, seconds: Mapping[str, float], why: str) -> Iterator[Event]:
    """Write the choice to disk before the first update. Collective."""
    chosen = Chosen(
        stage=run.stage.name,
        identity=identity_of(run.stage),
        parent=parent_id(run.planned),
        workers=run.worker.comm.size,
        choice=dict(run.choice),
        seconds=dict(seconds),
    )

    def write() -> None:
        assert run.worker.keeper is not None
        run.worker.keeper.require_held()
        write_chosen(run.worker.keeper.disk, run.worker.keeper.out, chosen)

    rank0(run.worker.comm, write)
    yield CompressionChosen(
        stage=run.stage.name,
        methods=_groups(state, chosen.choice),
        why=why,
        tried=tuple((called(name), taken) for name, taken in chosen.seconds.items()),
    )


def _groups(state: TrainState, choice: Choice) -> tuple[tuple[str, int, int, str], ...]:
    return tuple(grouped({p.name: p.tensor.numel() for p in state.solver.parameters}, choice))
