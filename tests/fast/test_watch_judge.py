"""Who is to blame when a job hangs, and who is slow: over tables of what is known of each rank."""

from dataclasses import replace

import pytest
from facade import Limits, Section

from stagerun.launch.watch.judge import SLOW, WINDOW, Pace, Seen, judge, quiet, tick
from stagerun.launch.watch.process import shortened

ITERATION, EVALUATION, SAVE, START = Section.ITERATION, Section.EVALUATION, Section.SAVE, Section.START


def seen(rank: int, idle: float = 0.1, waiting: bool = False, **more: object) -> Seen:
    """A rank in an iteration whose steps take half a second."""
    fields = {"section": ITERATION, "stage": "cyc1", "iter": 512, "slowest": 0.5, "state": "S", **more}
    return Seen(rank=rank, host=f"node{rank // 2}", pid=4000 + rank, idle=idle, waiting=waiting, **fields)  # type: ignore[arg-type]


# What is known of the ranks, and the ranks to blame; 60 s are an iteration's time-out.
CASES = {
    "all move": ([seen(0), seen(1), seen(2)], []),
    "one is busy and the others wait for it, for less than the time-out": ([seen(0, 59, True), seen(1, 59)], []),
    "one does not move, and the others wait for it": ([seen(0, 61, True), seen(1, 61), seen(2, 61, True)], [1]),
    "rank 0 does not move": ([seen(0, 60), seen(1, 60, True)], [0]),
    "two do not move": ([seen(0, 70), seen(1, 65), seen(2, 65, True)], [0, 1]),
    "others wait for long for one that saves": ([seen(0, 300, section=SAVE), seen(1, 300, True)], []),
    "saving takes too long": ([seen(0, 600, section=SAVE), seen(1, 600, True)], [0]),
    "one is stopped while it waits": ([seen(0, 90, True), seen(1, 90, True, state="T", stopped=60.0)], [1]),
    "one has been stopped for less": ([seen(0, 90, True), seen(1, 90, True, state="T", stopped=59.0)], []),
    "one is stopped where sections are long": ([seen(0, 61, True, section=START), seen(1, 61, section=START, state="T", stopped=60.0)], [1]),
    "a host is cut off": ([seen(0, 60, True), seen(1, 60, True), seen(2, 0, True, silence=60.0), seen(3, 0, silence=60.0)], [2, 3]),
    "a host has been silent for less": ([seen(0, 59, True), seen(1, 0, silence=59.0)], []),
    "a host is cut off where sections are long": ([seen(0, 61, True, section=START), seen(1, 0, True, section=START, silence=61.0)], [1]),
    "one whose steps took 20 s has ten times as long": ([seen(0, 199, True), seen(1, 199, slowest=20.0)], []),
    "and not longer": ([seen(0, 201, True), seen(1, 201, slowest=20.0)], [1]),
    "nothing is known of how long a step takes": ([seen(0, 599, slowest=0.0)], []),
    "a step may compile": ([seen(0, 599, compiled=True)], []),
    "a job of one worker": ([seen(0, 61)], [0]),
    "in a disk's hands": ([seen(0, 61, state="D")], [0]),
    "nobody reads its screen": ([seen(0, 90000, printing=True), seen(1, 90000, True)], []),
    "one has ended, and the others wait for it": ([seen(0, 61, True), seen(1, 0, ended=60.0), seen(2, 60, True)], [1]),
    "one has ended less long ago": ([seen(0, 90, True), seen(1, 0, ended=59.0)], []),
    "one has ended, and the others have begun to wait later": ([seen(0, 59, True), seen(1, 0, ended=600.0)], []),
    "one has ended, and another saves": ([seen(0, 500, section=SAVE), seen(1, 0, ended=600.0), seen(2, 600, True)], []),
    "one has ended in an evaluation": ([seen(0, 60, True, section=EVALUATION, slowest=0.0), seen(1, 0, ended=60.0)], [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame(name: str) -> None:
    ranks, blamed = CASES[name]
    verdict = judge(ranks, len(ranks), Limits())
    assert [guilty.rank for guilty in verdict.guilty] == blamed if verdict is not None else not blamed


def test_a_time_out_that_is_given_holds_whatever_the_steps_took() -> None:
    short = Limits({ITERATION: 5.0})
    slow = seen(1, 5.1, slowest=30.0, compiled=True)
    assert judge([seen(0, 5.1, True), slow], 2, short) is not None
    assert judge([seen(0, 5.1, True), replace(slow, section=EVALUATION)], 2, short) is None
    assert judge([seen(0, 9, True), seen(1, 9, section=SAVE, state="T", stopped=5.0)], 2, short) is not None


def test_in_a_large_job_a_monitor_speaks_more_seldom_and_is_not_silent_for_it() -> None:
    ranks = [replace(seen(rank, 70, True), silence=tick(1000) + 0.5) for rank in range(1000)]
    verdict = judge(ranks, 1000, Limits())
    assert verdict is not None and not verdict.guilty and quiet(1000) >= 3 * tick(1000) and quiet(4) == 2.0


def test_when_all_wait_for_each_other_it_is_the_network() -> None:
    ranks = [seen(rank, 70 - rank, True) for rank in range(4)]
    verdict = judge(ranks, 4, Limits())
    assert verdict is not None and not verdict.guilty
    text = verdict.message()
    assert text.startswith(
        "all 4 ranks have waited for each other for 1 min 07 s (time-out 1 min 00 s) in section iteration"
    )
    assert "the network between node0 and node1 does not carry" in text
    # The last one to wait has not waited for long; one is not watched; one has not been heard; one is stopped, and will be blamed.
    assert judge([*ranks[:3], seen(3, 59, True)], 4, Limits()) is None
    assert judge(ranks[:3], 4, Limits()) is None
    assert judge([*ranks[:3], seen(3, 70, True, silence=3.0)], 4, Limits()) is None
    assert judge([*ranks[:3], seen(3, 70, True, state="T", stopped=59.9)], 4, Limits()) is None


def test_ranks_that_no_one_watches_are_waited_for_as_long_as_anything_may_take() -> None:
    """Their monitors are gone, and they may be well."""
    watched = [seen(0, 1801, True), seen(2, 1800, True)]
    verdict = judge(watched, 4, Limits())
    assert verdict is not None and not verdict.guilty
    assert "for others, of which some are not watched: rank 1 and rank 3" in verdict.message()
    assert judge([watched[0], seen(2, 1799, True)], 4, Limits()) is None
    assert judge([watched[0], seen(2, 59, slowest=1.0)], 4, Limits()) is None, "they get on"
    assert judge(watched, 4, Limits({SAVE: 7200.0})) is None
    assert judge([seen(0, 1801, True, slowest=200.0)], 2, Limits()) is None
    assert judge([seen(1, 90000, True)], 1, Limits()) is None


@pytest.mark.parametrize(
    "one, text",
    [
        (
            seen(2, 61.4, state="T", stopped=61.2),
            "rank 2 on node1 has not moved for 1 min 01 s (time-out 1 min 00 s) in section iteration, `cyc1` at iteration 512; "
            "process 4002 is stopped (state T)",
        ),
        (
            seen(2, 61.4, state="D"),
            "process 4002 waits for a disk or a file server (state D), where no signal reaches it",
        ),
        (
            seen(2, 601, section=START, stage=""),
            "has not moved for 10 min 01 s (time-out 10 min 00 s) in section start",
        ),
        (
            seen(2, 1, silence=75.0),
            "rank 2 on node1 can't be reached for 1 min 15 s (time-out 1 min 00 s): its host, or the network to it, is down; it "
            "was in section iteration, `cyc1` at or after iteration 512",
        ),
    ],
)
def test_what_is_said(one: Seen, text: str) -> None:
    verdict = judge([seen(0, 70, True), replace(one, stack="File x\nFile y")], 2, Limits())
    assert verdict is not None
    said = verdict.message()
    assert text in said and "hint: run the same command again: it goes on from the newest snapshot" in said
    assert f"--timeout {one.section.value}=TIME" in said
    assert "  the Python stack of this rank, the newest call first:\n    File x\n    File y\n" in said


def test_of_many_only_some_are_named() -> None:
    verdict = judge([seen(rank, 70, stack="File x") for rank in range(64)], 64, Limits())
    assert verdict is not None
    said = verdict.message()
    assert "rank 3 on" in said and "rank 4 on" not in said and "and 60 more" in said and said.count("File x") == 1


FAULTHANDLER = """Thread 0x00007f26a57fa6c0 [loader] (most recent call first):
  File "/x/loader.py", line 331 in wait
  File "/x/threading.py", line 1002 in _bootstrap

Current thread 0x00007f27d1d0f080 [python] (most recent call first):
  File "/x/group.py", line 12 in wait
  File "/x/loop.py", line 60 in train
  File "/x/stagerun/launch/start.py", line 124 in _watched
  File "/x/click/core.py", line 911 in invoke
"""


def test_a_stack_is_that_of_the_thread_that_trains() -> None:
    main, loader = 0x00007F27D1D0F080, 0x00007F26A57FA6C0
    own = ['File "/x/group.py", line 12 in wait', 'File "/x/loop.py", line 60 in train']
    assert shortened(FAULTHANDLER, main).splitlines() == own
    # The signal's handler may run in any thread.
    assert shortened(FAULTHANDLER, loader).startswith('File "/x/loader.py", line 331 in wait')
    long = f"Thread {7:#018x} (most recent call first):\n" + '  File "/x/deep.py", line 1 in f\n' * 500
    assert shortened(FAULTHANDLER * 20 + long, 7).splitlines()[20:] == ["and 480 more"]
    assert shortened("", 7) == "" and shortened("nonsense\n", 7) == ""


# -- stragglers

NOTHING = [(0, 0.0), (0, 0.0)]


def paces(*looks: list[tuple[int, float]]) -> list[list[str]]:
    """What is reported at each look: (device batches, busy seconds) of each rank so far."""
    pace = Pace()
    return [pace.look([seen(n, batches=b, busy=s) for n, (b, s) in enumerate(look)]) for look in looks]


@pytest.mark.parametrize(
    "looks, slow",
    [
        # Of two ranks the faster is the measure.
        ([NOTHING, [(50, 5.0), (50, 5.0 * (SLOW + 0.01))]], 1),
        ([NOTHING, [(50, 5.0), (50, 5.0 * (SLOW - 0.01))]], 0),
        # More device batches are not slower ones.
        ([NOTHING, [(100, 10.0), (150, 15.0)]], 0),
        # Too few batches, or seconds, say nothing; nor does one rank alone.
        ([NOTHING, [(WINDOW - 1, 5.0), (WINDOW - 1, 50.0)]], 0),
        ([NOTHING, [(50, 0.5), (50, 4.0)]], 0),
        ([[(0, 0)], [(500, 50.0)]], 0),
        # A rank that comes late starts the comparison anew.
        ([[(0, 0)], [(500, 5.0), (500, 50.0)]], 0),
    ],
)
def test_who_is_slow(looks: list[list[tuple[int, float]]], slow: int) -> None:
    assert [len(texts) for texts in paces(*looks)] == [0, slow]


def test_a_slow_rank_is_reported_once_until_it_recovers() -> None:
    def look(n: int, slow: float) -> list[tuple[int, float]]:
        return [(n, n * 0.1), (n, n * 0.1), (n, slow), (n, n * 0.11)]

    told = paces(look(0, 0), look(50, 9.0), look(100, 18.0), look(150, 23.0), look(200, 33.0))
    assert [len(texts) for texts in told] == [0, 1, 0, 0, 1]
    assert told[1] == [
        "rank 2 on node1 is slow: a device batch takes it 0.18 s, 1.8 x the median of all 4; the others wait for it"
    ]


def test_a_suspended_job_has_no_slow_rank() -> None:
    pace = Pace()
    pace.look([seen(rank, batches=0, busy=0.0) for rank in range(2)])
    pace.restart()
    assert not pace.look([seen(rank, batches=50, busy=5.0 + 95.0 * rank) for rank in range(2)])
