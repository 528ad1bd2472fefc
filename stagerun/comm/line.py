"""A connection between two ranks alone: what either sends, the other receives, whatever becomes of the rest of the job.

Lines to several peers may be used by as many threads at a time, beside each other and beside the collectives of `Comm`. A peer that is
gone is a PeerError on its line, and nothing on another.
"""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.comm.group import AGAIN, PATIENT, Comm, TorchComm, first_words
from stagerun.system.pulse import Pulse

# Until the peer has come to the same call. Later on a peer that is gone shows at once; one that has not come yet can't.
MEETING = timedelta(minutes=1)


def store_client(timeout: timedelta) -> dist.Store:
    """A connection of its own to the store of the job: one that waits for a key keeps all others on its connection waiting. RuntimeError.

    All of stagerun's own keys are under one prefix, which is another one in each life of the workers under torchrun.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    client = dist.TCPStore(store.host, store.port, None, False, timeout, wait_for_workers=False)
    return dist.PrefixStore(f"stagerun/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", client)


class Line:
    """Made by `line`. One thread may send while another receives. `close` is for when neither does: what waits at the other end then
    raises PeerError."""

    def __init__(self, comm: TorchComm, peer: int, name: str, meeting: timedelta, pulse: Pulse | None) -> None:
        self.worker, self._traffic, self._pulse = comm.ranks[peer], comm.traffic, pulse
        own = comm.ranks[comm.rank]
        ranks = sorted((own, self.worker))
        mine = ranks.index(own)
        self._other = 1 - mine
        self._group: Any = None  # a ProcessGroupGloo; the stubs know neither send nor recv
        with _Waiting(self, "meet"):
            store = dist.PrefixStore(f"line/{name}/{ranks[0]}-{ranks[1]}", store_client(meeting))
            # First, since gloo goes on trying to reach a peer that was there once.
            store.set(f"here/{mine}", "")
            store.wait([f"here/{self._other}"], meeting)
            self._group = dist.ProcessGroupGloo(store, mine, 2, meeting)

    def send(self, tensor: Tensor) -> None:
        """Returns when `tensor` may be changed, which is not before the peer receives it. PeerError."""
        assert tensor.is_contiguous()
        self._traffic.add(tensor.nbytes)
        with _Waiting(self, "send to") as group:
            group.send([tensor.detach().cpu()], self._other, 0).wait(PATIENT)

    def recv(self, tensor: Tensor) -> None:
        """Fills `tensor` with what the peer sends next, which has as many bytes. PeerError."""
        assert tensor.is_contiguous()
        room = tensor.detach() if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        with _Waiting(self, "receive from") as group:
            group.recv([room], self._other, 0).wait(PATIENT)
        if room.device != tensor.device:
            tensor.detach().copy_(room)

    def close(self) -> None:
        self._group = None


def line(comm: Comm, peer: int, name: str, pulse: Pulse | None = None, meeting: timedelta = MEETING) -> Line:
    """A line to rank `peer` of `comm`, which calls this, too, with the same `name`; no one else does. A name is good for one line between
    two ranks. `pulse`: of the thread that trains, if that one uses the line; it shows that this rank waits for another. PeerError."""
    assert isinstance(comm, TorchComm)
    return Line(comm, peer, name, meeting, pulse)


class _Waiting:
    """Turns the RuntimeError of a line whose peer is gone into PeerError."""

    def __init__(self, line: Line, doing: str) -> None:
        self._line, self._doing = line, doing

    def __enter__(self) -> Any:
        if self._line._pulse is not None:
            self._line._pulse.wait()
        return self._line._group

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._line._pulse is not None:
            self._line._pulse.go_on()
        if isinstance(error, RuntimeError):
            raise PeerError(
                f"lost worker {self._line.worker} while trying to {self._doing} it: {first_words(error)}", AGAIN
            ) from error
