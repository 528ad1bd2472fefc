"""Two ranks among all, one message at a time: to find out what the link between them is worth. Nothing of training goes this way.

Tensors are on the CPU, so that it is gloo that carries them, whatever carries gradients.
"""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.errors import PeerError

# A message that takes longer is not to come: the link is cut. Well above what FIRST takes on 1 Mbit/s.
PATIENCE = timedelta(seconds=30)
# Bytes of the first message, and of the last.
FIRST, LARGEST = 1 << 18, 1 << 25
# A transfer that takes so long is long enough to be timed; a larger one is not tried.
ENOUGH_S = 0.15
PINGS, PINGS_S = 20, 0.5


def send(data: Tensor, to: int) -> None:
    """RuntimeError if the rank is gone or does not take it within PATIENCE: then all links of this process are closed."""
    work = dist.isend(data, to)
    assert work is not None
    work.wait(PATIENCE)


def receive(data: Tensor, source: int) -> None:
    """Fills `data`. RuntimeError as of `send`."""
    work = dist.irecv(data, source)
    assert work is not None
    work.wait(PATIENCE)


def measure(other: int, first: bool, name: str) -> tuple[float, float]:
    """(bytes per second from here to rank `other`, seconds of a round trip). Both call it, one as `first`. It takes less than two
    seconds on links of 10 Mbit/s or more. PeerError, with the `name` of that host, if it doesn't answer."""
    try:
        if first:
            trip = _pings(other)
            rate = _push(other)
            _pull(other)
        else:
            _echo(other)
            _pull(other)
            rate, trip = _push(other), 0.0
        return rate, trip
    except RuntimeError as error:
        raise PeerError(
            f"no answer from {name} within {PATIENCE.total_seconds():.0f} s while the link was measured",
            "look at the network between the two hosts, and at firewalls: all ports above 1024 must be open between them",
        ) from error


def _pings(other: int) -> float:
    """Each message says whether another one follows."""
    word, trips, began = torch.ones(1, dtype=torch.int64), list[float](), time.monotonic()
    while int(word):
        word[0] = int(len(trips) + 1 < PINGS and time.monotonic() - began < PINGS_S)
        since = time.monotonic()
        send(word, other)
        receive(word, other)
        trips.append(time.monotonic() - since)
    return min(trips)


def _echo(other: int) -> None:
    word = torch.ones(1, dtype=torch.int64)
    while int(word):
        receive(word, other)
        send(word, other)


def _push(other: int) -> float:
    """Messages of twice the size each, until one takes long enough: bytes per second of that one. What a shaped link lets through at once
    has gone with those before it."""
    size, rate, seconds = FIRST, 0.0, 0.0
    said = torch.zeros(1, dtype=torch.int64)
    while size <= LARGEST and seconds < ENOUGH_S:
        data = torch.zeros(size, dtype=torch.uint8)
        said[0] = size
        since = time.monotonic()
        send(said, other)
        send(data, other)
        receive(said, other)  # what is sent may still lie in this host's buffers
        seconds = time.monotonic() - since
        rate = size / seconds
        size *= 2
    said[0] = 0
    send(said, other)
    return rate


def _pull(other: int) -> None:
    said = torch.zeros(1, dtype=torch.int64)
    while True:
        receive(said, other)
        if not int(said):
            return
        receive(torch.empty(int(said), dtype=torch.uint8), other)
        send(said, other)
