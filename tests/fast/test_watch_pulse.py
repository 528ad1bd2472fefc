"""The record that a worker writes and its monitor reads, and the time-outs."""

import math
import random

import pytest
from facade import Limits, Pulse, Section

from stagerun.command.shared import limits
from stagerun.system.pulse import SIZE, Beat, beating, read


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Kept:
    """A pulse, its clock and what a monitor reads of it."""

    def __init__(self) -> None:
        self.clock, self.buffer = Clock(), bytearray(SIZE)
        self.pulse = Pulse(memoryview(self.buffer), self.clock)

    def after(self, seconds: float) -> Pulse:
        self.clock.now += seconds
        return self.pulse

    def read(self) -> Beat:
        found = read(bytes(self.buffer))
        assert found is not None
        return found


def test_what_is_written_is_read() -> None:
    kept = Kept()
    assert kept.read() == Beat(moved=100.0, since=100.0)
    kept.after(1).stage("cyc1", 7, compiled=True)
    assert kept.read() == Beat(Section.FIRST_ITERATION, compiled=True, moved=101.0, since=100.0, iter=7, stage="cyc1")
    kept.after(1).wait()
    assert kept.read().waiting and kept.read().since == 102.0 and kept.read().moved == 101.0
    kept.after(3).go_on()
    assert not kept.read().waiting and kept.read().moved == 105.0
    kept.pulse.stage("x" * 63 + "ü" * 9, 0, compiled=False)
    assert kept.read().stage.startswith("x" * 63)


def test_a_record_that_is_being_written_is_never_taken_for_whole() -> None:
    kept, rng = Kept(), random.Random(1)
    for number in range(300):
        before, iter_before = bytes(kept.buffer), kept.read().iter
        kept.pulse.stage("s", number + 1, compiled=False)
        after = bytes(kept.buffer)
        # Any part of the new bytes may be seen before any other.
        changed = [i for i in range(SIZE) if before[i] != after[i]]
        torn = bytearray(before)
        for i in rng.sample(changed, rng.randrange(len(changed) + 1)):
            torn[i] = after[i]
        found = read(bytes(torn))
        assert found is not None and found.iter in (iter_before, number + 1)
    assert read(bytes(SIZE)) is None


def test_sections_nest_and_come_back() -> None:
    kept = Kept()
    kept.pulse.stage("a", 0, compiled=False)
    with kept.after(5).section(Section.SAVE):
        assert kept.read().section is Section.SAVE and kept.read().moved == 105.0
        with kept.after(1).section(Section.EVALUATION):
            assert kept.read().section is Section.EVALUATION
        assert kept.read().section is Section.SAVE
    assert kept.read().section is Section.FIRST_ITERATION
    with pytest.raises(ValueError), kept.pulse.section(Section.SAVE):
        raise ValueError
    assert kept.read().section is Section.FIRST_ITERATION


def test_what_is_met_or_reported_while_images_are_copied_is_no_progress_of_the_copy() -> None:
    kept = Kept()
    with kept.pulse.section(Section.COPY):
        for _ in range(9):
            kept.after(1).wait()
            kept.after(1).go_on()
        assert kept.read().moved == 100.0
        kept.after(1).beat()
        assert kept.read().moved == 119.0
        for _ in range(3):
            kept.after(50).wait()
            kept.pulse.go_on()
            with kept.pulse.printing():
                kept.clock.now += 1000
            with kept.after(50).section(Section.SAVE):
                assert kept.read().moved == kept.clock.now
                kept.clock.now += 10
        assert kept.read().section is Section.COPY
        assert kept.clock.now - kept.read().moved == 300.0, "all but what it took to tell"
    assert kept.read().moved == kept.clock.now


def train(kept: Kept, iterations: int, batches: int, step: float, wait: float) -> None:
    for _ in range(iterations):
        begun = kept.clock.now
        for _ in beating(range(batches), kept.pulse):
            kept.clock.now += step
        kept.pulse.wait()
        kept.after(wait).go_on()
        kept.pulse.iterated(kept.read().iter + 1, kept.clock.now - begun)


def test_busy_seconds_leave_out_waiting_and_the_first_iteration() -> None:
    kept = Kept()
    kept.pulse.stage("a", 0, compiled=False)
    train(kept, 1, 3, step=100.0, wait=5.0)
    assert kept.read().batches == 0 and kept.read().section is Section.ITERATION
    train(kept, 10, 3, step=2.0, wait=5.0)
    with kept.after(1).section(Section.EVALUATION):
        for _ in beating(range(7), kept.pulse):
            kept.clock.now += 3
    assert kept.read().batches == 30 and kept.read().busy == pytest.approx(60.0) and kept.read().iter == 11


def test_the_slowest_step_is_remembered_for_a_while_without_what_others_took() -> None:
    kept = Kept()
    kept.pulse.stage("a", 0, compiled=False)
    train(kept, 1, 2, step=9.0, wait=500.0)
    assert kept.read().slowest == pytest.approx(9.0), "the first iteration says what to expect"
    train(kept, 120, 2, step=2.0, wait=500.0)
    assert kept.read().slowest == pytest.approx(2.0)
    with kept.pulse.section(Section.EVALUATION):
        assert kept.read().slowest == 0.0, "nothing is known of evaluations yet"
        for _ in beating(range(3), kept.pulse):
            kept.clock.now += 30
        assert kept.read().slowest == pytest.approx(30.0)
    assert kept.read().slowest == pytest.approx(2.0)
    with kept.pulse.section(Section.EVALUATION):
        assert kept.read().slowest == pytest.approx(30.0)


def test_a_suspension_says_nothing_of_how_long_a_step_takes() -> None:
    kept = Kept()
    kept.pulse.stage("a", 0, compiled=False)
    train(kept, 11, 2, step=0.5, wait=0.1)
    before = kept.read()
    kept.after(0.5).beat()
    kept.after(7200).beat()
    kept.pulse.wait()
    kept.after(0.1).go_on()
    kept.pulse.iterated(12, 7200.6)
    assert (kept.read().slowest, kept.read().busy, kept.read().batches) == (0.5, before.busy, before.batches)
    train(kept, 1, 2, step=0.5, wait=0.1)
    assert kept.read().busy == pytest.approx(before.busy + 1.0)
    # No suspension, but a rank that is allowed to be slow.
    patient = Pulse(memoryview(kept.buffer), kept.clock, Limits({Section.ITERATION: 9000.0}))
    patient.stage("a", 0, compiled=False)
    patient.iterated(1, 1.0)
    for _ in range(2):
        kept.clock.now += 7200
        patient.beat()
    assert kept.read().slowest == pytest.approx(7200)


def test_printing_is_reported_and_an_iteration_goes_on_after_it() -> None:
    kept = Kept()
    kept.pulse.stage("a", 0, compiled=False)
    train(kept, 1, 2, step=1.0, wait=0.0)
    begun = kept.clock.now
    for _ in range(2):
        kept.after(1).beat()
    kept.pulse.wait()
    kept.after(50).go_on()
    with kept.pulse.section(Section.SAVE), kept.pulse.printing():
        assert kept.read().printing and kept.read().section is Section.SAVE
        kept.clock.now += 1000
    assert not kept.read().printing and kept.read().moved == kept.clock.now
    kept.pulse.iterated(2, 52.0)
    assert begun and kept.read().busy == pytest.approx(2.0) and kept.read().batches == 2


TIME_OUTS = {
    (): [(Section.START, {}, 600), (Section.SAVE, {}, 600), (Section.COPY, {}, 1800), (Section.ITERATION, {"slowest": 1.0}, 60),
         (Section.ITERATION, {"slowest": 7.0}, 70), (Section.EVALUATION, {"slowest": 0.0}, 600),  # not a batch is done yet
         (Section.ITERATION, {"slowest": 1.0, "compiled": True}, 600)],
    ("first_iteration=2h", "iteration=3s"): [(Section.ITERATION, {"slowest": 9.0, "compiled": True}, 3)],
    ("iteration=90s", "save = 1:00:00"): [(Section.ITERATION, {}, 90), (Section.SAVE, {}, 3600), (Section.COPY, {}, 1800)],
    ("iteration=off",): [(Section.ITERATION, {}, math.inf)],
}  # fmt: skip


@pytest.mark.parametrize("words", TIME_OUTS)
def test_time_outs(words: tuple[str, ...]) -> None:
    found = limits(words)
    assert found is not None and limits(("off",)) is None
    for section, known, seconds in TIME_OUTS[words]:
        assert found.of(section, **known) == seconds
    assert words[:1] != ("first_iteration=2h",) or found.longest == 7200
