"""One weight update of each replica of a stage with `sync_param`, and their synchronisation where one is due."""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice

import torch

from stagerun.base.knobs import Knobs
from stagerun.comm import Reducer
from stagerun.engine.images import Batch
from stagerun.engine.replicas import Replicas
from stagerun.engine.state import TrainState
from stagerun.engine.update import BROKEN_OFF, Arithmetic, Outcome, Summed, apply, not_finite, summed, too_fast

_WHAT = ("", "the loss of replica {} is", "a gradient of replica {} is", "BatchNorm's statistics of replica {} are")


def update_replicas(
    state: TrainState,
    pieces: Iterable[tuple[int, Batch, bool]],
    knobs: Knobs | Callable[[float], Knobs],
    reducer: Reducer,
    how: Arithmetic,
    stop: Callable[[], bool],
    hopeless: Callable[[int], bool] = lambda done: False,
) -> Outcome:
    """As `update`, of the replicas of `state`, which have parted. `reducer` is theirs.

    All gradients come before anything is moved, and the ranks tell each other a few numbers before it: so either all replicas are moved
    or none is, and all ranks report the same loss.
    """
    replicas = state.replicas
    assert replicas is not None
    state.to_training()
    part = replace(how, logical_workers=replicas.logical_workers)
    found: dict[int, Summed] = {}
    left, done, broken = iter(pieces), 0, False
    for r, run in replicas.runs.items():
        replicas.turn(r)
        mine = ((k, batch, k == run[-1]) for k, (_, batch, _) in zip(run, islice(left, len(run)), strict=True))

        def too_late(number: int, done: int = done) -> bool:
            nonlocal broken
            broken = broken or hopeless(done + number)
            return broken

        found[r] = summed(state, mine, reducer, part, stop, too_late)
        done += len(run)
    started = next(reversed(found.values())).started
    losses, wrong, stopping = _agreed(replicas, found, part, how.normalise.device)
    loss = sum(losses) / how.logical_workers
    if stopping >= BROKEN_OFF:
        return Outcome(loss, True, time.monotonic() - started, broken_off=True)
    if not wrong:
        now = knobs if isinstance(knobs, Knobs) else knobs(loss)
        wrong = too_fast(state, now, loss)
    if wrong:
        state.statistics.forget()
        return Outcome(loss, stopping > 0, time.monotonic() - started, wrong)
    for number, (r, one) in enumerate(found.items()):
        replicas.turn(r)
        if number:
            state.statistics.once_more()
        for parameter in state.solver.parameters:
            parameter.tensor.grad = one.gradients[parameter.name]
        apply(state, one, now, part)
        reducer.accept()
    state.iter += 1
    met = replicas.meet(state.iter)
    return Outcome(loss, stopping > 0, time.monotonic() - started, met=met)


def _agreed(
    replicas: Replicas, found: dict[int, Summed], how: Arithmetic, device: torch.device
) -> tuple[list[float], str, float]:
    """(the loss of each replica, summed over its logical workers; what is not finite, '' if all is; how many ask to stop), the same on all
    ranks. Of each number all ranks but one add 0, so that the sums are exact."""
    said = torch.zeros(2 * replicas.count + 1, dtype=torch.float64)
    for r, one in found.items():
        if replicas.holders[r] == replicas.comm.rank:
            said[r], said[replicas.count + r] = one.loss_sum, _wrong(one, how)
            said[-1] += one.stopping
    said = said.to(device)
    replicas.comm.all_reduce(said)()
    losses, codes = said[: replicas.count].tolist(), said[replicas.count : -1].tolist()
    wrong = next((f"{_WHAT[int(code)].format(r)} not finite" for r, code in enumerate(codes) if code), "")
    return losses, wrong, float(said[-1])


def _wrong(one: Summed, how: Arithmetic) -> int:
    """Which of `_WHAT` it is."""
    loss = one.loss_sum / how.logical_workers
    if not not_finite(loss, one.size, one.gradients, one.moved):
        return 0
    return 1 if not_finite(loss, 0.0, {}, 0.0) else 2 if not_finite(loss, one.size, one.gradients, 0.0) else 3
