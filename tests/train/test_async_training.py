"""Stages with `sync_param { method: ASYNC }` as a whole, replicas in threads: a run and the replay of its record have the same bits, whatever
happened; and one replica alone has those of plain training."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from async_help import ITERATIONS, SNAPSHOT, Found, Killed, Stage, survivors
from engine_help import CPU, SOLVER, ConvNet, assert_same, dataset, tensors
from facade import (
    Determinism,
    Diverged,
    Iterated,
    PeerError,
    Precision,
    SnapshotDue,
    Stopped,
    TrainState,
    make_state,
    train,
)

from stagerun.comm import SoloComm, make_reducer
from stagerun.wire.asynchronous import Asynchronous

pytestmark = pytest.mark.long

SOLVERS = {
    "sgd": SOLVER,
    "float": replace(SOLVER, precision=Precision.FP32),
    "clipped": replace(SOLVER, clip_gradients=0.5),
    "adam": replace(SOLVER, type="Adam", momentum2=0.99, delta=1e-8, clip_gradients=0.5),
    "lars": replace(SOLVER, type="LARS"),
}


def same_everywhere(found: list[Found | None]) -> Found:
    """All that are left have the same state; rank 0's."""
    first, *others = survivors(found)
    for other in others:
        assert_same(first.tensors(), other.tensors())
        assert other.state.iter == first.state.iter
    return first


def assert_replays(stage: Stage, run: Found, *replicas: int) -> None:
    for number in replicas:
        again = same_everywhere(stage.replay(run.record, number))
        assert_same(run.tensors(), again.tensors())
        assert again.record.encoded() == run.record.encoded()
        assert again.state.iter == run.state.iter
        curve, its = ({event.iter: event.loss for event in one.of(Iterated)} for one in (run, again))
        assert curve.items() <= its.items(), "of a run that went on, those of its last life"


# -- the same bits


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_and_its_replay_by_any_number_of_replicas(name):
    stage = Stage(solver=SOLVERS[name])
    run = same_everywhere(stage.run(4))
    assert run.record.ends == [10, 20, 24]
    assert 0 < max(run.record.staleness) <= 3
    assert {int(n) for name, n in run.tensors().items() if name.endswith("num_batches_tracked")} == {ITERATIONS}
    assert_replays(stage, run, 1, 2, 5)


@pytest.mark.parametrize("name", SOLVERS)
def test_one_replica_alone_is_plain_training(name):
    stage = Stage(solver=SOLVERS[name])
    (alone,) = survivors(stage.run(1))
    state, loop = make_state(stage.make(), stage.solver, CPU), stage.stage_loop()
    parameters = [p.tensor for p in state.solver.parameters]
    reducer = make_reducer(Determinism.FIXED, parameters, SoloComm(), loop.arithmetic.logical_workers)
    places = ((8 * i + 2 * worker, 2) for i in range(ITERATIONS) for worker in range(4))
    events = train(loop, state, stage.batches(places), reducer, lambda: False)
    losses = [event.loss for event in events if isinstance(event, Iterated)]
    assert_same(tensors(state), alone.tensors())
    assert [(event.loss, event.staleness) for event in alone.of(Iterated)] == [(loss, 0) for loss in losses]


# -- what is told


def test_rank_0_tells_of_each_iteration_once_and_all_of_boundaries():
    found = survivors(Stage().run(3))
    told = found[0].of(Iterated)
    assert [event.iter for event in told] == list(range(1, ITERATIONS + 1))
    assert [event.staleness for event in told] == found[0].record.staleness
    assert [event.replica for event in told] == found[0].record.replicas
    for one in found:
        assert [event.iter for event in one.of(SnapshotDue)] == [SNAPSHOT, 2 * SNAPSHOT]
    rates = {event.lr for event in told}
    assert rates == {0.05 / (i + 1) for i in range(ITERATIONS)}, "each iteration at its own rate"


# -- stops and resumes


def resumed(run: Found, stage: Stage) -> Callable[[], TrainState]:
    """What a snapshot of it gives back."""

    def make() -> TrainState:
        state = make_state(stage.make(), stage.solver, CPU)
        state.model.load_state_dict({k: v.clone() for k, v in run.state.model.state_dict().items()})
        for slot, kept in run.state.solver.history.items():
            for name, tensor in kept.items():
                state.solver.history[slot][name].copy_(tensor)
        state.iter = run.state.iter
        return state

    return make


@pytest.mark.parametrize("who", [0, 2])
def test_a_stop_ends_a_leg_and_the_whole_can_be_replayed(who):
    stage = Stage(solver=SOLVERS["adam"])
    stops = replace(stage, stop=lambda rank, events: rank == who and len(events) >= 5)
    run = same_everywhere(stops.run(3))
    assert isinstance(run.events[-1], Stopped) and 5 <= run.state.iter < ITERATIONS
    assert run.record.last == run.state.iter == len(run.record.iterations)
    assert_replays(stage, run, 1, 3)
    rest = same_everywhere(stage.run(4, state=resumed(run, stage), record=run.record))
    assert rest.record.until(run.state.iter) == run.record and rest.record.last == ITERATIONS
    assert_replays(stage, rest, 1, 2)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_replay_that_is_stopped_goes_back_to_the_last_boundary(replicas):
    stage = Stage(max_staleness=5)
    run = same_everywhere(stage.run(5))
    stops = replace(stage, stop=lambda rank, events: sum(isinstance(e, Iterated) for e in events) >= 13 // replicas)
    for seed in range(4):
        half = same_everywhere(replace(stops, seed=seed).run(replicas, recorded=run.record))
        assert half.state.iter in (0, SNAPSHOT, 2 * SNAPSHOT)
        assert isinstance(half.events[-1], Stopped)
        rest = stage.replay(run.record, 3, state=resumed(half, stage), record=half.record)
        assert_same(run.tensors(), same_everywhere(rest).tensors())


# -- deaths


def kills(rank: int, name: str, number: int) -> Callable[[Asynchronous], None]:
    """That process dies before the `number`-th call of a method, from 0."""

    def prepare(pushing: Asynchronous) -> None:
        honest, calls = getattr(pushing, name), count()

        def call(*arguments: Any) -> Any:
            if next(calls) == number:
                raise Killed
            return honest(*arguments)

        if pushing.comm.rank == rank:
            setattr(pushing, name, call)

    return prepare


@pytest.mark.parametrize("rank", [1, 2])
def test_a_death_ends_all(rank):
    with pytest.raises(PeerError):
        Stage(prepare=kills(rank, "_computed", 3)).run(3)


def test_where_a_replay_loses_one_all_end_and_none_waits_for_what_it_had():
    stage = Stage(max_staleness=5)
    run = same_everywhere(stage.run(5))
    for number in range(4):
        with pytest.raises(PeerError):
            replace(stage, prepare=kills(2, "_ask", 1 + 2 * number)).run(3, recorded=run.record)


# -- what is not finite


class Poison(ConvNet):
    """Its loss is not finite where all pixels of an image are 255."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        bad = (x > 1.54).flatten(1).all(1)
        return found + torch.where(bad, float("nan"), 0.0)[:, None]


@pytest.mark.parametrize("replicas", [1, 3])
def test_where_nothing_is_skipped_the_first_ends_the_stage(replicas):
    data = dataset(8 * ITERATIONS)
    data.images[8 * 6 + 3] = 255
    with pytest.raises(Diverged, match=r"the loss is nan at iteration 6, learning rate 0\.00714"):
        Stage(make=Poison, data=data).run(replicas)
