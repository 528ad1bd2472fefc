"""The monitors among each other: who comes to rank 0's, and what becomes of those that go."""

import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from stagerun.engine.device import synchronize
from stagerun.launch import StopRequest
from stagerun.launch.watch import peers
from stagerun.launch.watch.judge import Ending, Seen
from stagerun.launch.watch.peers import Hub, Spoke
from stagerun.launch.watch.process import Setup
from stagerun.system.pulse import Limits, Pulse, Section
from stagerun.system.world import World
from stagerun.train.join import join

PLACE = {"token": "a" * 32, "name": "node0"}


def setup(rank: int, address: str = "127.0.0.1", one_host: bool = True) -> Setup:
    return Setup(
        rank=rank,
        size=2,
        pid=1,
        thread=0,
        host=f"node{rank}",
        address=address,
        one_host=one_host,
        limits={},
        pulse=0,
        stack=0,
        link=0,
    )


def seen(rank: int, idle: float = 0.0, waiting: bool = False) -> Seen:
    return Seen(
        rank=rank, host=f"node{rank}", pid=1, section=Section.ITERATION, slowest=0.5, idle=idle, waiting=waiting
    )


class Pair:
    """Both sides in one process."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.told: list[dict] = []
        self.ends: list[Ending] = []
        self.hub = Hub(setup(0), Limits(), self.selector, self.told.append, lambda: "")
        self.spoke = Spoke(setup(1), Limits(), self.selector, self.ends.append, lambda: "")
        self.hub.listen()
        self.port = self.told.pop()["port"]
        self.ahead = 0.0  # of the clock

    def until(self, found: Callable[[], object]) -> None:
        """Both look and listen in turn."""
        end = time.monotonic() + 120
        while not found():
            assert time.monotonic() < end
            self.spoke.retry_at = 0.0
            now = time.monotonic() + self.ahead
            self.spoke.judge(seen(1), now)
            self.hub.judge(seen(0), now)
            for key, _ in self.selector.select(0.05):
                key.data(key.fileobj)

    def meet(self) -> None:
        address = ("127.0.0.1", self.port)
        self.spoke.meet({**PLACE, "family": int(socket.AF_INET), "address": list(address)})

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_who_comes_before_the_token_is_known_comes_again(pair: Pair) -> None:
    pair.meet()
    turned_away = []
    forget = pair.hub._forget
    pair.hub._forget = lambda lines: (turned_away.append(lines), forget(lines))  # type: ignore[method-assign, assignment]
    pair.until(lambda: turned_away and not pair.spoke.connected)
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None)


def test_a_monitor_that_goes_without_a_word_is_reported_and_no_rank_is_blamed(pair: Pair) -> None:
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None)
    pair.spoke._leave()
    pair.spoke.hub_at = None
    pair.until(lambda: 1 in pair.hub.lost)
    now = time.monotonic()
    assert pair.hub.judge(seen(0, 900, waiting=True), now + 9) is None and not pair.told
    assert pair.hub.judge(seen(0, 900, waiting=True), now + 900) is None and pair.hub.verdict is None
    (news,) = pair.told
    assert news["news"] == "rank 1 is not watched any more: its monitor is gone; a hang there is noticed late"


@pytest.mark.parametrize("size, gone", [(2, True), (1000, False)])
def test_who_speaks_seldom_is_not_gone(pair: Pair, size: int, gone: bool) -> None:
    """Each of a thousand ranks speaks once in two seconds."""
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None and pair.spoke.connected)
    pair.hub.setup, pair.spoke.setup = replace(pair.hub.setup, size=size), replace(pair.spoke.setup, size=size)
    later = max(pair.hub.peers[1].heard, pair.spoke.hub_heard) + 2.5
    assert bool(pair.hub.gone(later)) is gone is bool(pair.spoke.gone(later))


def test_one_that_says_that_its_worker_has_ended_is_blamed_by_those_that_wait(pair: Pair) -> None:
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None)
    pair.spoke.farewell()
    pair.spoke.hub_at = None  # its process is at its end
    pair.until(lambda: pair.hub.peers[1].left is not None)
    now = time.monotonic()
    assert pair.hub.judge(seen(0), now + 900) is None and pair.hub.verdict is None
    pair.hub.judge(seen(0, 61, waiting=True), now + 61)
    assert pair.hub.verdict is not None and "rank 1 on node1 has ended" in pair.hub.verdict.message({})
    assert not pair.told


def test_rank_0_may_say_so_too(pair: Pair) -> None:
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None)
    pair.hub.farewell()
    pair.until(lambda: pair.spoke.hub_left is not None)
    now = time.monotonic()
    assert pair.spoke.judge(seen(1, 59, waiting=True), now + 61) is None
    end = pair.spoke.judge(seen(1, 61, waiting=True), now + 61)
    assert end is not None and "rank 0 on node0 has ended" in end.text and not end.guilty


@pytest.mark.parametrize("one_host, address", [(False, "node-a"), (True, "127.0.1.1")])
def test_where_a_host_knows_itself_by_a_number_that_no_other_reaches(
    monkeypatch: pytest.MonkeyPatch, one_host: bool, address: str
) -> None:
    """Debian: /etc/hosts has `127.0.1.1 node-a`."""
    real = socket.getaddrinfo

    def fake(host: str, port: int, **more: int) -> list:
        return real("127.0.1.1" if host == "node-a" else host, port, **more)

    monkeypatch.setattr(peers.socket, "getaddrinfo", fake)
    told: list[dict] = []
    selector = selectors.DefaultSelector()
    Hub(setup(0, "node-a", one_host), Limits(), selector, told.append, lambda: "").listen()
    (listener,) = (key.fileobj for key in selector.get_map().values())
    assert isinstance(listener, socket.socket)
    assert told[0]["address"] == address
    assert listener.getsockname()[0] == ("127.0.1.1" if one_host else "0.0.0.0")
    listener.close()


def test_what_is_computed_is_waited_for_and_no_collective_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs is to be waited for where this rank is seen to wait."""
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("stream")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append("all"))
    synchronize(torch.device("cuda", 0))
    assert waited == ["stream"]


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


@pytest.mark.parametrize("worded", [True, False])
def test_a_worker_that_was_killed_is_gone_and_one_that_ends_with_an_error_is_not(pair: Pair, worded: bool) -> None:
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None and pair.spoke.hub_known)
    now = time.monotonic()
    assert pair.hub.gone(now) == [] == pair.spoke.gone(now)
    assert pair.hub.gone(now + 10) == ["rank 1 on node1"], "nothing is heard of it"
    assert pair.spoke.gone(now + 10) == ["rank 0 on node0"]
    pair.spoke.farewell(worded)
    pair.spoke.hub_at = None
    pair.until(lambda: pair.hub.peers[1].left is not None)
    assert pair.hub.gone(time.monotonic()) == ([] if worded else ["rank 1 on node1"])


def test_a_connection_that_breaks_is_a_host_that_is_gone(pair: Pair) -> None:
    pair.meet()
    pair.hub.meet(PLACE["token"])
    pair.until(lambda: 1 in pair.hub.peers and pair.hub.peers[1].seen is not None and pair.spoke.hub_known)
    pair.hub._close(pair.hub.peers[1])
    del pair.hub.peers[1]
    pair.spoke.hub_at = None
    pair.until(lambda: not pair.spoke.connected)
    assert pair.spoke.gone(time.monotonic()) == ["rank 0 on node0"]
