"""A connection between two ranks, apart from the collectives of `Comm`. Several threads may use a line each at the same time. A lost peer
raises PeerError on its own line only."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.comm.group import PATIENT, Comm, TorchComm, default_store, peers
from stagerun.comm.store import MEETING, client, meet

Message = tuple[Sequence[Any], Sequence[Tensor]]  # words, as JSON holds them, and vectors


class Line:
    """One end. Rank `peer` of `comm` opens the other with the same `name`, which serves one line. Raises PeerError."""

    def __init__(self, comm: Comm, peer: int, name: str, meeting: timedelta = MEETING) -> None:
        assert isinstance(comm, TorchComm)
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

    def send(self, words: Sequence[Any], vectors: Sequence[Tensor]) -> None:
        """Sends a JSON value after its length, then the vectors; nothing is pickled. They may be changed afterwards. Raises PeerError."""
        kinds = [(str(vector.dtype).removeprefix("torch."), len(vector)) for vector in vectors]
        text = torch.frombuffer(bytearray(json.dumps([words, kinds]).encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([len(text)]), text, *vectors):
            self._traffic.add(tensor.nbytes)
            with self._peer("send to it"):
                self._group.send([tensor.detach().cpu()], self._other, 0).wait(PATIENT)

    def receive(self, device: torch.device) -> Message:
        """Returns what the peer sends next. Raises PeerError."""
        size = int(self._received(torch.zeros(1, dtype=torch.int64)))
        words, kinds = json.loads(self._received(torch.zeros(size, dtype=torch.uint8)).numpy().tobytes())
        rooms = [torch.empty(length, dtype=getattr(torch, dtype)) for dtype, length in kinds]
        return words, [self._received(room).to(device) for room in rooms]

    def _received(self, room: Tensor) -> Tensor:
        with self._peer("receive from it"):
            self._group.recv([room], self._other, 0).wait(PATIENT)
        return room

    def close(self) -> None:
        """Not during a `send` or `receive` here. A peer that waits gets PeerError."""
        self._group = None
