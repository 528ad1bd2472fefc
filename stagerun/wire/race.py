"""Real steps of dense gradients and of each method that `method: AUTO` may choose, timed in turn, on this link and with this network."""

import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

from stagerun.comm import Reducer, gather_json, runs_of
from stagerun.engine.device import synchronize
from stagerun.engine.state import TrainState, make_state
from stagerun.engine.update import update
from stagerun.models import build
from stagerun.schedule import Knobs
from stagerun.train.context import StageRun
from stagerun.train.resident import training_batches
from stagerun.train.stage_loop import arithmetic_of

STEPS = 6  # of each that are timed, after one that makes room for things
_LONG = 120.0  # seconds after which fewer are enough


class Trial:
    """Steps of a stage on a copy of its state, in which every logical worker has the same batch."""

    def __init__(self, run: StageRun, state: TrainState) -> None:
        worker, solver = run.worker, run.stage.solver
        self.own, self.device = runs_of(solver.logical_workers, worker.comm.size)[worker.comm.rank], worker.device
        size, start = solver.device_batch_size, run.planned.position + run.planned.skipped
        first = start + state.iter * solver.batch_size + self.own.start * size
        with training_batches(run, None, [(first, size)]) as batches:
            self.batch = deepcopy(next(batches))  # its memory is the loader's
        teacher = worker.schedule.teacher_model(run.stage)
        self.how = arithmetic_of(run.stage, worker.device, teacher=teacher)
        model = build(run.stage.model)
        model.load_state_dict(state.model.state_dict())
        # What compiled code takes less, there is less of to hide the sending.
        self.solver = replace(solver, compile=False, ema_decay=None)
        self.state = make_state(model, self.solver, worker.device)

    def step(self, reducer: Reducer) -> float:
        """Seconds of one. Collective, if the reducer is."""
        pieces = ((worker, self.batch, worker == self.own[-1]) for worker in self.own)
        began = time.perf_counter()
        update(self.state, pieces, Knobs(0.0, self.solver.momentum, 0.0), reducer, self.how, lambda: False)
        synchronize(self.device)
        return time.perf_counter() - began


def race(run: StageRun, trial: Trial, reducers: Mapping[str, Reducer]) -> dict[str, list[float]]:
    """Return seconds of the slowest worker in each timed step, by method; nothing where a rank is asked to stop. Collective."""
    comm, began, names = run.worker.comm, time.monotonic(), list(reducers)
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
