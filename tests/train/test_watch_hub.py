"""The monitors among each other: who comes to rank 0's, and what becomes of those that go."""

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from facade import Limits, Pulse, Section, World

from stagerun.launch import StopRequest
from stagerun.launch.watch.judge import Seen, judge
from stagerun.launch.watch.peers import Peers
from stagerun.train.join import join

TOKEN = "a" * 32


def seen(rank: int, idle: float = 0.0, waiting: bool = False) -> Seen:
    host = f"node{rank}"
    return Seen(rank=rank, host=host, pid=1, section=Section.ITERATION, slowest=0.5, idle=idle, waiting=waiting)


class Pair:
    """The monitors of two ranks in one process."""

    def __init__(self, size: int = 2) -> None:
        self.selector = selectors.DefaultSelector()
        self.ends: list[str] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.place = {"token": TOKEN, "name": "node0", "family": int(socket.AF_INET), "address": listener.getsockname()}
        self.hub = Peers(0, size, self.selector, self.ends.append, listener.detach())
        self.spoke = Peers(1, size, self.selector, self.ends.append)

    def until(self, found: Callable[[], object]) -> None:
        """Both look and listen in turn."""
        end = time.monotonic() + 120
        while not found():
            assert time.monotonic() < end
            now = time.monotonic() + 10  # so that it comes again at once
            self.spoke.speak(seen(1), now)
            self.hub.speak(seen(0), now)
            for key, _ in self.selector.select(0.05):
                key.data(key.fileobj)

    def meet(self) -> None:
        self.hub.meet(self.place)
        self.spoke.meet(self.place)
        self.until(lambda: self.known(self.hub) and self.known(self.spoke))

    @staticmethod
    def known(side: Peers) -> list[int]:
        return [one.rank for one in side.seen(time.monotonic())]

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_who_comes_before_the_token_is_known_comes_again_and_one_with_another_does_not(pair: Pair) -> None:
    pair.spoke.meet(pair.place)
    pair.hub.meet({"token": "b" * 32})
    pair.until(lambda: pair.spoke.judged(time.monotonic()))
    pair.until(lambda: not pair.spoke.judged(time.monotonic()))
    assert not pair.known(pair.hub) and not pair.spoke.gone(time.monotonic())
    pair.hub.meet(pair.place)
    pair.until(lambda: pair.known(pair.hub) == [1] and pair.known(pair.spoke) == [0])


def test_for_a_monitor_that_goes_without_a_word_no_rank_is_blamed(pair: Pair) -> None:
    pair.meet()
    pair.spoke.peers[0].lines.close()  # type: ignore[union-attr]
    pair.selector.unregister(pair.spoke.peers[0].lines)  # type: ignore[arg-type]
    pair.spoke.place = {}
    pair.until(lambda: not pair.known(pair.hub))
    now = time.monotonic()
    assert pair.hub.gone(now) == ["rank 1 on node1"]
    assert judge([seen(0, 900, waiting=True), *pair.hub.seen(now)], 2, Limits()) is None


@pytest.mark.parametrize("size, gone", [(2, True), (1000, False)])
def test_who_speaks_seldom_is_not_gone(size: int, gone: bool) -> None:
    """Each of a thousand ranks speaks once in two seconds."""
    pair = Pair(size)
    pair.meet()
    later = max(pair.hub.peers[1].heard, pair.spoke.peers[0].heard) + 2.5
    assert bool(pair.hub.gone(later)) is gone is bool(pair.spoke.gone(later)) is not pair.spoke.judged(later)
    pair.close()


@pytest.mark.parametrize("worded", [True, False])
def test_a_worker_that_was_killed_is_gone_and_one_that_ends_with_an_error_is_not(pair: Pair, worded: bool) -> None:
    """Both are blamed by those that wait for them."""
    pair.meet()
    pair.spoke.send({"bye": True, "worded": worded})
    pair.spoke.place = {}
    pair.until(lambda: pair.hub.peers[1].left is not None)
    now = time.monotonic()
    assert pair.hub.gone(now) == ([] if worded else ["rank 1 on node1"])
    assert judge([seen(0, 59, waiting=True), *pair.hub.seen(now + 61)], 2, Limits()) is None
    verdict = judge([seen(0, 61, waiting=True), *pair.hub.seen(now + 61)], 2, Limits())
    assert verdict is not None and "rank 1 on node1 has ended" in verdict.message()


def test_what_rank_0_decides_the_others_hear_and_that_it_is_gone(pair: Pair) -> None:
    pair.meet()
    assert pair.spoke.judged(time.monotonic())
    pair.hub.send({"end": "it hangs"})
    pair.spoke.send({"end": "a rank may not say so"})
    pair.until(lambda: pair.ends)
    pair.hub.send({"bye": True, "worded": False})
    pair.until(lambda: not pair.spoke.judged(time.monotonic()))
    assert pair.ends == ["it hangs"] and pair.spoke.gone(time.monotonic()) == ["rank 0 on node0"]
    verdict = judge([seen(1, 61, waiting=True), *pair.spoke.seen(time.monotonic() + 61)], 2, Limits())
    assert verdict is not None and "rank 0 on node0 has ended" in verdict.message()


def test_collectives_wait_for_days_where_the_monitors_see_to_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that was suspended goes on, and `--timeout off` means off."""
    asked = []

    class Fake:
        pulse = Pulse()

        def __init__(self, world: World, device: torch.device, pulse: Pulse | None, timeout: timedelta) -> None:
            asked.append(timeout)

    monkeypatch.setattr("stagerun.train.join.TorchComm", Fake)
    for patient in (False, True):
        join(World(rank=0, size=2, local_rank=0, local_size=2), 1, StopRequest("to save"), None, patient)
    assert asked[0] == timedelta(minutes=30) and asked[1] >= timedelta(days=1)
