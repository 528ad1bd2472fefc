"""Who is to blame when a job hangs, and who is slow: the record that a worker writes and its monitor reads, the monitors among each other, and the
judgement over what is known of each rank."""

import math
import random
import socket
from dataclasses import replace
from typing import Any

import pytest
from facade import Limits, Pulse, Section

from stagerun.command.shared import limits
from stagerun.launch.judge import SLOW, WINDOW, Pace, Peers, Seen, judge, quiet, tick
from stagerun.launch.monitor import shortened
from stagerun.system.pulse import SIZE, Beat, beating, read

ITERATION, EVALUATION, SAVE, START = Section.ITERATION, Section.EVALUATION, Section.SAVE, Section.START


def seen(rank: int, idle: float = 0.1, waiting: bool = False, **more: object) -> Seen:
    """A rank in an iteration whose steps take half a second."""
    fields = {"section": ITERATION, "stage": "cyc1", "iter": 512, "slowest": 0.5, "state": "S", **more}
    return Seen(rank=rank, host=f"node{rank // 2}", pid=4000 + rank, idle=idle, waiting=waiting, **fields)


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
    "a monitor was killed, and the job goes on": ([seen(0, 0.5, True), seen(1, 600, True, silence=600.0)], []),
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
def test_who_is_to_blame(name):
    ranks, blamed = CASES[name]
    verdict = judge(ranks, len(ranks), Limits())
    assert [guilty.rank for guilty in verdict.guilty] == blamed if verdict is not None else not blamed


def test_a_time_out_that_is_given_holds_whatever_the_steps_took():
    short = Limits({ITERATION: 5.0})
    slow = seen(1, 5.1, slowest=30.0, compiled=True)
    assert judge([seen(0, 5.1, True), slow], 2, short) is not None
    assert judge([seen(0, 5.1, True), replace(slow, section=EVALUATION)], 2, short) is None
    assert judge([seen(0, 9, True), seen(1, 9, section=SAVE, state="T", stopped=5.0)], 2, short) is not None


def test_in_a_large_job_a_monitor_speaks_more_seldom_and_is_not_silent_for_it():
    ranks = [replace(seen(rank, 70, True), silence=tick(1000) + 0.5) for rank in range(1000)]
    verdict = judge(ranks, 1000, Limits())
    assert verdict is not None and not verdict.guilty and quiet(1000) >= 3 * tick(1000) and quiet(4) == 2.0


def test_when_all_wait_for_each_other_it_is_the_network():
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


def test_ranks_that_no_one_watches_are_waited_for_as_long_as_anything_may_take():
    """Their monitors are gone, and they may be well."""
    watched = [seen(0, 1801, True), seen(2, 1800, True)]
    verdict = judge(watched, 4, Limits())
    assert verdict is not None and not verdict.guilty
    assert "for others, some of them without a monitor: rank 1 and rank 3" in verdict.message()
    assert judge([watched[0], seen(2, 1799, True)], 4, Limits()) is None
    assert judge([watched[0], seen(2, 59, slowest=1.0)], 4, Limits()) is None, "they get on"
    assert judge(watched, 4, Limits({SAVE: 7200.0})) is None
    assert judge([seen(0, 1801, True, slowest=200.0)], 2, Limits()) is None
    assert judge([seen(1, 90000, True)], 1, Limits()) is None


def message(ranks: list[Seen]) -> str:
    verdict = judge(ranks, len(ranks), Limits())
    assert verdict is not None
    return verdict.message()


STOPPED = """rank 2 on node1 has not moved for 1 min 01 s (time-out 1 min 00 s) in section iteration, `cyc1` at iteration 512; \
process 4002 is stopped (state T)"""
UNREACHED = """rank 2 on node1 can't be reached for 1 min 15 s (time-out 1 min 00 s): its host, or the network to it, is down; it \
was in section iteration, `cyc1` at or after iteration 512"""


@pytest.mark.parametrize(
    "one, text",
    [
        (seen(2, 61.4, state="T", stopped=61.2), STOPPED),
        (
            seen(2, 61.4, state="D"),
            "process 4002 waits for a disk or a file server (state D), where no signal reaches it",
        ),
        (
            seen(2, 601, section=START, stage=""),
            "has not moved for 10 min 01 s (time-out 10 min 00 s) in section start",
        ),
        (seen(2, 1, silence=75.0), UNREACHED),
    ],
)
def test_what_is_said(one, text):
    said = message([seen(0, 70, True), replace(one, stack="File x\nFile y")])
    assert text in said and "hint: run the same command again: it resumes from the newest snapshot" in said
    assert f"--timeout {one.section.value}=TIME" in said
    assert "  the Python stack of this rank, the newest call first:\n    File x\n    File y\n" in said


def test_of_many_only_some_are_named():
    said = message([seen(rank, 70, stack="File x") for rank in range(64)])
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


def test_a_stack_is_that_of_the_thread_that_trains():
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
def test_who_is_slow(looks, slow):
    assert [len(texts) for texts in paces(*looks)] == [0, slow]


def test_a_slow_rank_is_reported_once_until_it_recovers():
    def look(n: int, slow: float) -> list[tuple[int, float]]:
        return [(n, n * 0.1), (n, n * 0.1), (n, slow), (n, n * 0.11)]

    told = paces(look(0, 0), look(50, 9.0), look(100, 18.0), look(150, 23.0), look(200, 33.0))
    assert [len(texts) for texts in told] == [0, 1, 0, 0, 1]
    assert told[1] == [
        "rank 2 on node1 is slow: a device batch takes it 0.18 s, 1.8 x the median of all 4; the others wait for it"
    ]


def test_a_suspended_job_has_no_slow_rank():
    pace = Pace()
    pace.look([seen(rank, batches=0, busy=0.0) for rank in range(2)])
    pace.restart()
    assert not pace.look([seen(rank, batches=50, busy=5.0 + 95.0 * rank) for rank in range(2)])


# -- the record


class Kept:
    """A pulse, the time, and what a monitor reads of it."""

    def __init__(self) -> None:
        self.now, self.buffer = 100.0, bytearray(SIZE)
        self.pulse = Pulse(memoryview(self.buffer), lambda: self.now)

    def after(self, seconds: float) -> Pulse:
        self.now += seconds
        return self.pulse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.read(), name)

    def read(self) -> Beat:
        found = read(bytes(self.buffer))
        assert found is not None
        return found


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def staged(kept):
    kept.pulse.stage("a", 0, compiled=False)
    return kept


def test_a_record_that_is_being_written_is_never_taken_for_whole(kept):
    rng = random.Random(1)
    for number in range(300):
        before, iter_before = bytes(kept.buffer), kept.iter
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


def test_what_is_met_or_reported_while_images_are_copied_is_no_progress_of_the_copy(kept):
    with kept.pulse.section(Section.COPY):
        for _ in range(9):
            kept.after(1).wait()
            kept.after(1).go_on()
        assert kept.moved == 100.0
        kept.after(1).beat()
        assert kept.moved == 119.0
        for _ in range(3):
            kept.after(50).wait()
            kept.pulse.go_on()
            with kept.pulse.printing():
                kept.now += 1000
            with kept.after(50).section(Section.SAVE):
                assert kept.moved == kept.now
                kept.now += 10
        assert kept.section is Section.COPY
        assert kept.now - kept.moved == 300.0, "all but what it took to tell"
    assert kept.moved == kept.now


def train(kept: Kept, iterations: int, batches: int, step: float, wait: float) -> None:
    for _ in range(iterations):
        begun = kept.now
        for _ in beating(range(batches), kept.pulse):
            kept.now += step
        kept.pulse.wait()
        kept.after(wait).go_on()
        kept.pulse.iterated(kept.iter + 1, kept.now - begun)


def test_busy_seconds_leave_out_waiting_and_the_first_iteration(staged):
    train(staged, 1, 3, step=100.0, wait=5.0)
    assert staged.batches == 0 and staged.section is Section.ITERATION
    train(staged, 10, 3, step=2.0, wait=5.0)
    with staged.after(1).section(Section.EVALUATION):
        for _ in beating(range(7), staged.pulse):
            staged.now += 3
    assert staged.batches == 30 and staged.busy == pytest.approx(60.0) and staged.iter == 11


def test_the_slowest_step_is_remembered_for_a_while_without_what_others_took(staged):
    train(staged, 1, 2, step=9.0, wait=500.0)
    assert staged.slowest == pytest.approx(9.0), "the first iteration says what to expect"
    train(staged, 120, 2, step=2.0, wait=500.0)
    assert staged.slowest == pytest.approx(2.0)
    with staged.pulse.section(Section.EVALUATION):
        assert staged.slowest == 0.0, "nothing is known of evaluations yet"
        for _ in beating(range(3), staged.pulse):
            staged.now += 30
        assert staged.slowest == pytest.approx(30.0)
    assert staged.slowest == pytest.approx(2.0)
    with staged.pulse.section(Section.EVALUATION):
        assert staged.slowest == pytest.approx(30.0)


def test_a_suspension_says_nothing_of_how_long_a_step_takes(staged):
    train(staged, 11, 2, step=0.5, wait=0.1)
    before = staged.read()
    staged.after(0.5).beat()
    staged.after(7200).beat()
    staged.pulse.wait()
    staged.after(0.1).go_on()
    staged.pulse.iterated(12, 7200.6)
    assert (staged.slowest, staged.busy, staged.batches) == (0.5, before.busy, before.batches)
    train(staged, 1, 2, step=0.5, wait=0.1)
    assert staged.busy == pytest.approx(before.busy + 1.0)
    # No suspension, but a rank that is allowed to be slow.
    patient = Pulse(memoryview(staged.buffer), lambda: staged.now, Limits({Section.ITERATION: 9000.0}))
    patient.stage("a", 0, compiled=False)
    patient.iterated(1, 1.0)
    for _ in range(2):
        staged.now += 7200
        patient.beat()
    assert staged.slowest == pytest.approx(7200)


def test_printing_is_reported_and_an_iteration_goes_on_after_it(staged):
    train(staged, 1, 2, step=1.0, wait=0.0)
    begun = staged.now
    for _ in range(2):
        staged.after(1).beat()
    staged.pulse.wait()
    staged.after(50).go_on()
    with staged.pulse.section(Section.SAVE), staged.pulse.printing():
        assert staged.printing and staged.section is Section.SAVE
        staged.now += 1000
    assert not staged.printing and staged.moved == staged.now
    staged.pulse.iterated(2, 52.0)
    assert begun and staged.busy == pytest.approx(2.0) and staged.batches == 2


TIME_OUTS = {
    (): [(Section.START, {}, 600), (Section.SAVE, {}, 600), (Section.COPY, {}, 1800), (Section.ITERATION, {"slowest": 1.0}, 60),
         (Section.ITERATION, {"slowest": 7.0}, 70), (Section.EVALUATION, {"slowest": 0.0}, 600),  # not a batch is done yet
         (Section.ITERATION, {"slowest": 1.0, "compiled": True}, 600)],
    ("first_iteration=2h", "iteration=3s"): [(Section.ITERATION, {"slowest": 9.0, "compiled": True}, 3)],
    ("iteration=90s", "save = 1:00:00"): [(Section.ITERATION, {}, 90), (Section.SAVE, {}, 3600), (Section.COPY, {}, 1800)],
    ("iteration=off",): [(Section.ITERATION, {}, math.inf)],
}  # fmt: skip


@pytest.mark.parametrize("words", TIME_OUTS)
def test_time_outs(words):
    found = limits(words)
    assert found is not None and limits(("off",)) is None
    for section, known, seconds in TIME_OUTS[words]:
        assert found.of(section, **known) == seconds
    assert words[:1] != ("first_iteration=2h",) or found.longest == 7200


# -- the monitors among each other

TOKEN = "a" * 32
HUB, SPOKE = seen(0, 0.0), seen(1, 0.0)


class Pair:
    """The monitors of two ranks."""

    def __init__(self) -> None:
        self.hub, self.spoke = Peers(0, 2), Peers(1, 2)
        self.sockets = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(2)]
        for one in self.sockets:
            one.bind(("127.0.0.1", 0))
        self.address = self.sockets[0].getsockname()
        self.sockets[1].connect(self.address)
        self.hub.meet(TOKEN, self.sockets[0])
        self.spoke.meet(TOKEN, self.sockets[1])

    def exchange(self, spoke: Seen = SPOKE, hub: Seen = HUB, end: str = "", now: float = 100.0) -> str:
        """Each speaks once; return what the spoke hears of the end. A datagram on the loopback device is there at once."""
        self.spoke.speak(spoke)
        self.hub.hear(now)
        self.hub.speak(hub, end)
        return self.spoke.hear(now)


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    for one in pair.sockets:
        one.close()


def test_a_stranger_is_not_heard(pair):
    pair.spoke.meet("b" * 32, pair.sockets[1])
    pair.exchange()
    for said in (
        b"",
        b"[]\n",
        b"nonsense",
        b"\xff",
        b"[" * 50_000,
        b'{"token": "' + b"x" * 60_000,
        b'{"token": "", "rank": 1}',
    ):
        pair.sockets[1].sendto(said, pair.address)
    pair.hub.hear(100.0)
    assert not pair.hub.seen(100.0) and not pair.spoke.seen(100.0) and not pair.spoke.judged(100.0)


@pytest.mark.parametrize("size, gone", [(2, True), (1000, False)])
def test_who_speaks_seldom_is_not_gone(pair, size, gone):
    """Each of a thousand ranks speaks once in two seconds."""
    pair.hub.size = pair.spoke.size = size
    pair.exchange()
    assert bool(pair.hub.gone(102.5)) is gone is bool(pair.spoke.gone(102.5)) is not pair.spoke.judged(102.5)
    pair.hub.woke(102.5)
    assert not pair.hub.gone(102.5), "this process itself was stopped"


@pytest.mark.parametrize("worded", [True, False])
def test_a_worker_that_was_killed_is_gone_and_one_that_ends_with_an_error_is_not(pair, worded):
    """Both are blamed by those that wait for them."""
    pair.exchange(spoke=replace(SPOKE, ended=1e-9, worded=worded))
    assert pair.hub.gone(100.0) == ([] if worded else ["rank 1 on node0"])
    assert judge([seen(0, 59, waiting=True), *pair.hub.seen(161.0)], 2, Limits()) is None
    verdict = judge([seen(0, 61, waiting=True), *pair.hub.seen(161.0)], 2, Limits())
    assert verdict is not None and "rank 1 on node0 has ended" in verdict.message()


def test_what_rank_0_decides_the_others_hear_and_that_it_is_gone(pair):
    assert pair.exchange() == "" and pair.spoke.judged(100.0)
    assert pair.exchange(end="it hangs") == "it hangs"
    pair.spoke.speak(SPOKE, "a rank may not say so")
    assert pair.hub.hear(100.0) == ""
    pair.exchange(hub=replace(HUB, ended=1e-9, worded=False))
    assert not pair.spoke.judged(100.0) and pair.spoke.gone(100.0) == ["rank 0 on node0"]
    verdict = judge([seen(1, 61, waiting=True), *pair.spoke.seen(161.0)], 2, Limits())
    assert verdict is not None and "rank 0 on node0 has ended" in verdict.message()
