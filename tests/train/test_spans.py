"""Where an iteration's time goes: spans, what is summed of them, the trace made of them, and a loop that is looked at."""

import itertools

from engine_help import CPU, SOLVER, ConvNet, assert_same, tensors
from test_engine_loop import device_batches, go, short, stage_loop

from stagerun.base.recipe import Determinism
from stagerun.base.spans import (
    BACKWARD,
    DATA,
    FORWARD,
    PARTS,
    REDUCTION,
    UPDATE,
    WAIT,
    Span,
    Spans,
    overlap,
    seconds_of,
)
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.state import make_state
from stagerun.engine.timed import timed_train


class Clock:
    """Each look is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def spans() -> list[Span]:
    """One iteration: the second reduction begins within the first and ends after backward."""
    return [
        Span(DATA, 0, 1, 7, 0, "a"),
        Span(FORWARD, 1, 3, 7, 0, "a"),
        Span(BACKWARD, 3, 8, 7, 0, "a"),
        Span(REDUCTION, 4, 6, 7, 10, "a"),
        Span(REDUCTION, 5, 9, 7, 4_200_000, "a"),
        Span(WAIT, 8, 9, 7, 0, "a"),
        Span(UPDATE, 9, 10, 7, 0, "a"),
    ]


def test_what_is_under_way_at_one_time_counts_once():
    lay = overlap(spans())
    assert (lay.iterations, lay.backward, lay.sending, lay.hidden) == (1, 5, 5, 4)
    assert lay.share == 4 / 5
    assert overlap([]).share == 0
    assert seconds_of(spans()) == {DATA: 1, FORWARD: 2, BACKWARD: 5, WAIT: 1, UPDATE: 1}


def test_a_loop_that_is_looked_at_trains_to_the_same_bits_and_every_second_has_its_part():
    plain = make_state(ConvNet(), SOLVER, CPU)
    events = go(stage_loop(), plain)
    state, found, loop = make_state(ConvNet(), SOLVER, CPU), Spans(Clock()), stage_loop()
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 4)
    timed = list(timed_train(loop, state, device_batches(loop), reducer, lambda: False, lambda: None, found, CPU))
    assert short(timed) == short(events)
    assert_same(tensors(state), tensors(plain))
    assert {s.iter for s in found.found} == set(range(9)) and {s.stage for s in found.found} == {"cyc1"}
    one = [s.name for s in found.found if s.iter == 4]
    assert one == [*[DATA, FORWARD, BACKWARD] * len(loop.run), WAIT, UPDATE]
    assert all(a.ended <= b.started for a, b in itertools.pairwise(found.found))
    assert set(seconds_of(found.found)) == set(PARTS)
