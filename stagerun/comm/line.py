"""A connection between two ranks alone: what either sends, the other receives, whatever becomes of the rest of the job.

Lines to several peers may be used by as many threads at a time, beside each other and beside the collectives of `Comm`. A peer that is
gone is a PeerError on its line, and nothing on another.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.comm.group import PATIENT, Comm, TorchComm, default_store, peers
from stagerun.comm.store import MEETING, client, meet


class Line:
    """Made by `line`. One thread may send while another receives. `close` is for when neither does: what waits at the other end then
    raises PeerError."""

    def __init__(self, comm: TorchComm, peer: int, name: str, meeting: timedelta) -> None:
        own, self.worker = comm.ranks[comm.rank], comm.ranks[peer]
        both = sorted((own, self.worker))
        self._traffic = comm.traffic
        self._other = both.index(self.worker)
        self._group: Any = None  # a ProcessGroupGloo; the stubs know neither send nor recv
        with self._peer("meet it"):
            store = client(default_store(), f"line/{name}/{both[0]}-{both[1]}", meeting)
            # First, since gloo goes on trying to reach a peer that was there once.
            meet(store, own, both, meeting)
            self._group = dist.ProcessGroupGloo(store, both.index(own), 2, meeting)

    def _peer(self, doing: str) -> peers:
        return peers(doing, None, f"worker {self.worker}")

    def send(self, tensor: Tensor) -> None:
        """Returns when `tensor` may be changed, which is not before the peer receives it. PeerError."""
        assert tensor.is_contiguous()
        self._traffic.add(tensor.nbytes)
        with self._peer("send to it"):
            self._group.send([tensor.detach().cpu()], self._other, 0).wait(PATIENT)

    def recv(self, tensor: Tensor) -> None:
        """Fills `tensor` with what the peer sends next, which has as many bytes. PeerError."""
        assert tensor.is_contiguous()
        room = tensor.detach() if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
        with self._peer("receive from it"):
            self._group.recv([room], self._other, 0).wait(PATIENT)
        if room.device != tensor.device:
            tensor.detach().copy_(room)

    def close(self) -> None:
        self._group = None


def line(comm: Comm, peer: int, name: str, meeting: timedelta = MEETING) -> Line:
    """A line to rank `peer` of `comm`, which calls this, too, with the same `name`; no one else does. A name is good for one line between
    two ranks. PeerError."""
    assert isinstance(comm, TorchComm)
    return Line(comm, peer, name, meeting)
