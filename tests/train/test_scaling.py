"""`rehearse`: where an iteration's time goes, what is made of turns of `--workers 1,2,4`, and rates of a short schedule. Mistakes:
tests/cases/rehearse_workers.txt."""

import itertools
from collections.abc import Sequence

import pytest
from engine_help import CPU, SOLVER, ConvNet, assert_same, tensors
from facade import Determinism, make_state, rehearsal, spans
from test_engine_loop import device_batches, go, short, stage_loop

from stagerun import language
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.timed import timed_train
from stagerun.schedule import make_knobs
from stagerun.tools.rehearse.scaling import Share, Turn, notes, render, rows

# One iteration: the second reduction begins within the first and ends after backward.
ONE = [
    (spans.DATA, 0, 1),
    (spans.FORWARD, 1, 3),
    (spans.BACKWARD, 3, 8),
    (spans.REDUCTION, 4, 6),
    (spans.REDUCTION, 5, 9),
    (spans.WAIT, 8, 9),
    (spans.UPDATE, 9, 10),
]


def test_what_is_under_way_at_one_time_counts_once():
    one = [spans.Span(name, begun, ended, 7, 0, "a") for name, begun, ended in ONE]
    lay = spans.overlap(one)
    assert (lay.iterations, lay.backward, lay.sending, lay.hidden, lay.share) == (1, 5, 5, 4, 4 / 5)
    assert spans.overlap([]).share == 0
    seconds = {spans.DATA: 1, spans.FORWARD: 2, spans.BACKWARD: 5, spans.WAIT: 1, spans.UPDATE: 1}
    assert spans.seconds_of(one) == seconds


def test_a_loop_that_is_looked_at_trains_to_the_same_bits_and_every_second_has_its_part():
    plain, state, loop = make_state(ConvNet(), SOLVER, CPU), make_state(ConvNet(), SOLVER, CPU), stage_loop()
    events = go(loop, plain)
    found = spans.Spans(map(float, itertools.count()).__next__)  # each look is a second later
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 4)
    timed = list(timed_train(loop, state, device_batches(loop), reducer, lambda: False, lambda: None, found, CPU))
    assert short(timed) == short(events)
    assert_same(tensors(state), tensors(plain))
    assert {(s.iter, s.stage) for s in found.found} == {(i, "cyc1") for i in range(9)}
    each = [spans.DATA, spans.FORWARD, spans.BACKWARD] * len(loop.run)
    assert [s.name for s in found.found if s.iter == 4] == [*each, spans.WAIT, spans.UPDATE]
    assert all(a.ended <= b.started for a, b in itertools.pairwise(found.found))
    assert set(spans.seconds_of(found.found)) == set(spans.PARTS)


# -- turns


def turn(round: int, workers: int, seconds: Sequence[float], wait: float = 0.0) -> Turn:
    parts = {spans.DATA: 0.5, spans.FORWARD: 1.0, spans.BACKWARD: 2.0, spans.WAIT: wait, spans.UPDATE: 0.5}
    shares = tuple(Share(f"n{i // 2}", s, parts, 2 * wait, wait) for i, s in enumerate(seconds))
    return Turn(round=round, workers=workers, iterations=2, shares=shares)


TURNS = [
    turn(0, 1, [4.0]),
    turn(0, 2, [2.5, 2.4], 1.0),
    turn(1, 2, [5.0, 4.0], 1.0),  # all is half as fast in this round
    turn(1, 1, [8.0]),
    turn(2, 1, [4.0]),
    turn(2, 2, [2.0, 2.0], 1.0),
]


def test_a_machine_that_is_slower_in_one_round_changes_no_efficiency() -> None:
    one, two = rows(TURNS, 100)
    assert (one.workers, one.images_per_second, one.low, one.high, one.efficiency) == (1, 50, 25, 50, 1)
    assert (two.images_per_second, two.low, two.high) == (80, 40, 100)  # of the slower rank
    assert two.efficiency == pytest.approx(4 / 2.5 / 2)
    assert (one.computing, one.communicating, one.waiting) == (3.5 / 4, 0, 0.5 / 4)
    assert (two.computing, two.communicating, two.waiting) == (3.5 / 5, 1 / 5, 0.5 / 5)
    assert (two.sending, two.hidden) == (1.0, 0.5)


def test_what_is_told() -> None:
    text = render(rows(TURNS, 100), notes(TURNS, 100, 5, "cpu", 2, 2, "28 x 28, raw"))
    assert "strong scaling" in text and "a cluster behaves otherwise" in text and "fewer than their 4 threads" in text
    assert "dealt out evenly to 2" in text and "28 x 28, raw" in text
    assert len(notes([turn(0, 1, [1.0])], 100, 5, "cpu", 2, 2, "")) == 2


# -- rates

SCHEDULE = """name: "r" model { name: "resnet_small" num_classes: 10 } data { train { source: "t" images: 64 } }
solver { batch_size: 16 device_batch_size: 2 } stage { name: "a" } stage { name: "b" }
"""
STARTS = ("", "warmup_iter: 100", *(f"warmup_iter: {n} decay_from: WARMUP_END" for n in (2, 40)))


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_a_rehearsal_has_a_rate_everywhere(iters: int) -> None:
    shapes = """base_lr: 1 max_iter: 100 power: 1.5 gamma: 0.5 lr_iter: 300 stepsize: 5 stepvalue: 3 end_lr: 0.5
    plateau_winsize: 1 knot {{ iter: 0 factor: 0 }} knot {{ iter: 50 factor: 1 }} policy_start_iter: 1 {} lr_policy: "{}" """
    for policy in language.ranges.CHOICES["Solver.lr_policy"]:
        for start in STARTS:
            made = shapes.format(start, policy)
            whole = language.read({"schedule.prototxt": SCHEDULE, "a.prototxt": made, "b.prototxt": made}, "/x")
            for stage in rehearsal(whole, iters, 1, 1).stages:
                knobs = make_knobs(stage.solver)
                seen = [knobs(i) for i in range(stage.solver.max_iter)]
                assert all(0 <= k.lr <= 1 / 16 and 0 <= k.momentum < 1 and k.weight_decay >= 0 for k in seen)
