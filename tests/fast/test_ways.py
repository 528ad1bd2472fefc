"""What AUTO weighs: bytes and seconds on the link by their formulas, which ways are tried, and when one is taken."""

import pytest

from stagerun.plan.link import (
    Coding,
    Senders,
    Speeds,
    cheapest,
    collectives,
    compressed_step,
    dense_step,
    pays_below,
    ring_bytes,
    sent,
    work,
)
from stagerun.plan.prediction import OVERLAP, Link
from stagerun.plan.ways import DENSE, MIXED, Job, Way, decided, enough, still_tried, ways, with_lossless, worth_trying

SLOW = Speeds(Link(1e6, 0.01), Link(1e6, 0.001))
FAST = Speeds(Link(1e12), Link(1e12))
LARGE, SMALL = 4e6, 400.0  # bytes


def codings(size: float) -> dict[str, Coding]:
    """Dense, and a method that sends a hundredth, at a millisecond a message and a microsecond for 1000 bytes."""
    return {
        DENSE: Coding(rounds=(size,), slices="float32"),
        "TOP_K": Coding(rounds=(size / 100,), encode=1e-3 + 1e-9 * size, add=1e-4),
    }


def job(speeds: Speeds, workers: int = 2) -> Job:
    return Job(who=Senders(workers, workers), speeds=speeds, computing=0.5, one_pass=0.5, dense=[LARGE, LARGE, SMALL])


CHUNKS = [{"a": codings(LARGE)}, {"b": codings(LARGE)}, {"c": codings(SMALL)}]


def test_bytes_of_a_worker() -> None:
    message, rounded = Coding(rounds=(100, 20)), Coding(rounds=(100,), slices="bfloat16")
    assert ring_bytes(1000, 4) == 1500
    assert sent(message, Senders(4, 4)) == 3 * 120
    assert sent(message, Senders(2, 8)) == 4 * 120  # each of its four logical workers sends one
    assert sent(rounded, Senders(4, 4)) == 150  # as a ring, of half the bytes
    assert sent(rounded, Senders(2, 8)) == (4 + 1) * 50
    assert sent(message, Senders(1, 1)) == sent(rounded, Senders(1, 1)) == 0


def test_work_of_a_worker() -> None:
    assert work(Coding(rounds=(1,), encode=3, add=2), Senders(4, 8)) == 2 * 3 + 8 * 2
    assert work(Coding(rounds=(1,), slices="float32", encode=3, add=2), Senders(4, 8)) == 2 * 3 + 2 * 2


def test_collectives_of_a_chunk() -> None:
    two = Coding(rounds=(1, 1))
    assert collectives([two, Coding(rounds=(1,))]) == 2
    assert collectives([Coding(rounds=(1,), varies=True)]) == 2
    assert collectives([Coding(rounds=(1,), slices="float32"), Coding(rounds=(1,), slices="bfloat16"), two]) == 6


def test_backward_hides_all_but_the_last_chunk() -> None:
    # 4 s for each of the large chunks and almost nothing for the last, over a backward pass of a third of a second.
    hidden = OVERLAP * 0.5 * 2 / 3
    wire = 2 * (LARGE / 1e6 + 0.01) + SMALL / 1e6 + 0.01
    assert dense_step([LARGE, LARGE, SMALL], 2, SLOW, 0.5, 0.5) == pytest.approx(0.5 + wire - hidden)


def test_compressing_is_hidden_by_nothing() -> None:
    one = Coding(rounds=(0.0,), encode=2.0, add=1.0)
    assert compressed_step([[one]], Senders(2, 2), FAST, 0.5, 0.5) == pytest.approx(0.5 + 2 + 2 * 1)


def test_the_bandwidth_below_which_it_pays() -> None:
    assert pays_below(1000, 100, 0.5) == 1800
    assert pays_below(1000, 1000, 0.5) == 0
    assert cheapest(codings(LARGE), Senders(2, 2), SLOW) == "TOP_K"
    assert cheapest(codings(SMALL), Senders(2, 2), SLOW) == DENSE
    assert cheapest(codings(LARGE), Senders(2, 2), FAST) == DENSE


def test_each_tensor_has_the_cheapest_method() -> None:
    found = {way.name: way for way in ways(CHUNKS, job(SLOW), mixed=True)}
    assert found[MIXED].choice == {"*": DENSE, "a": "TOP_K", "b": "TOP_K"}
    assert found["TOP_K"].choice == {"*": "TOP_K"} and found[DENSE].choice == {"*": DENSE}
    assert found[MIXED].predicted < found[DENSE].predicted
    assert [way.name for way in ways(CHUNKS, job(SLOW), mixed=False)] == ["TOP_K", DENSE]


def test_a_rule_for_some_tensors_stays() -> None:
    ruled = [*CHUNKS, {"d": {"SIGN": Coding(rounds=(LARGE / 32,), encode=7.0)}}]
    found = {way.name: way for way in ways(ruled, job(SLOW), mixed=True)}
    assert "d" not in found[MIXED].choice and "SIGN" not in found
    assert found[DENSE].predicted > 7  # its own compression is in there


def test_without_loss_in_fewer_bytes() -> None:
    found = with_lossless(ways(CHUNKS, job(SLOW), mixed=False), job(SLOW), 0.8, 1e-9)
    by_name = {way.name: way.predicted for way in found}
    assert by_name["TOP_K"] < by_name["LOSSLESS"] < by_name[DENSE]
    assert [way.name for way in found] == ["TOP_K", "LOSSLESS", DENSE]


def test_what_is_not_worth_a_try() -> None:
    found = [Way("a", {}, 1.0), Way("b", {}, 1.2), Way("c", {}, 1.4), Way("d", {}, 1.6), Way(DENSE, {}, 2.9)]
    assert [way.name for way in worth_trying(found, 3)] == [DENSE, "a", "b", "c"]
    assert [way.name for way in worth_trying(found, 1)] == [DENSE, "a"]
    assert [way.name for way in worth_trying([found[0], Way(DENSE, {}, 3.1)], 3)] == ["a"]
    assert [way.name for way in worth_trying([Way(DENSE, {}, 1.0), Way("a", {}, 1.6)], 3)] == [DENSE]


def test_what_falls_behind_is_not_tried_on() -> None:
    taken = {"a": [1.0, 1.1, 1.0], "b": [1.4, 1.6, 1.6], DENSE: [2.0, 2.0, 2.0]}
    assert still_tried(taken, list(taken), first=True) == ["a", "b", DENSE]
    assert still_tried(taken, list(taken), first=False) == ["a"]


@pytest.mark.parametrize(
    "steps, elapsed, left, over",
    [(1, 0, 2, False), (9, 1, 2, True), (2, 40, 2, False), (3, 40, 2, True), (1, 130, 2, True), (1, 0, 1, True)],
)
def test_trying_ends(steps: int, elapsed: float, left: int, over: bool) -> None:
    assert enough(steps, elapsed, left) is over


@pytest.mark.parametrize(
    "taken, best",
    [
        ({DENSE: [1.0, 1.0, 1.0, 1.0], "a": [0.9, 0.9, 0.9, 0.9]}, "a"),
        ({DENSE: [1.0, 1.0, 1.0, 1.0], "a": [0.98, 0.98, 0.98, 0.98]}, DENSE),  # not clearly
        ({DENSE: [1.0, 1.0, 1.0, 1.0], "a": [0.5, 0.5, 1.1, 1.1]}, DENSE),  # not surely
        ({DENSE: [1.0, 2.0, 4.0], "a": [0.9, 1.8, 3.6]}, "a"),  # a machine that slows down slows both
        ({DENSE: [2.0], "a": [1.0, 1.0, 1.0], "b": [0.9, 0.9, 0.9]}, "b"),
        ({"a": [1.0], "b": [0.9]}, "b"),
    ],
)
def test_dense_stays_unless_another_is_clearly_faster(taken: dict[str, list[float]], best: str) -> None:
    assert decided(taken)[0] == best
