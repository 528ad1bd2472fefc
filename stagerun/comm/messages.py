"""Messages of bytes, from every sender to every rank. A rank has one sender or several."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.comm.compression.places import joined
from stagerun.comm.group import Comm

SAME = "run the same stagerun on all hosts, and the same command again: it goes on from the newest snapshot"


class Messages:
    """`runs[r]` are the senders of rank r. No message is longer than `most` bytes."""

    def __init__(self, comm: Comm, runs: Sequence[range], device: torch.device, most: int) -> None:
        self.comm, self.runs, self.device, self.most = comm, runs, device, most

    def share(self, messages: list[list[Tensor]], sizes: Sequence[int | None]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending the messages, by item and own sender. The answer waits, and has those of all by item and sender.

        `sizes`: the bytes of each item's message, None where only the sender knows.
        """
        by_sender = list(zip(*messages, strict=True))
        lengths = self._lengths(by_sender, sizes)
        buffers = [torch.empty(sum(map(sum, table)), dtype=torch.uint8, device=self.device) for table in lengths]
        if by_sender:  # a rank may have no sender
            buffers[self.comm.rank] = joined([message for row in by_sender for message in row])
        wait = self.comm.complete(buffers)

        def arrived() -> list[list[Tensor]]:
            wait()
            found: list[list[Tensor]] = [[] for _ in sizes]
            for piece, table in zip(buffers, lengths, strict=True):
                parts = iter(piece.split([length for row in table for length in row]))
                for _ in table:
                    for messages_of_item in found:
                        messages_of_item.append(next(parts))
            return found

        return arrived

    def _lengths(self, messages: Sequence[Sequence[Tensor]], sizes: Sequence[int | None]) -> list[list[list[int]]]:
        """By rank, sender and item. Known sizes are not sent."""
        if None not in sizes:
            return [[list(sizes) for _ in run] for run in self.runs]  # type: ignore[arg-type]
        tables = [torch.empty((len(run), len(sizes)), dtype=torch.int64, device=self.device) for run in self.runs]
        if messages:
            mine = torch.tensor([[message.numel() for message in row] for row in messages], dtype=torch.int64)
            tables[self.comm.rank].copy_(mine)
        self.comm.complete([table.view(-1) for table in tables])()
        found = [table.tolist() for table in tables]
        for rank, table in enumerate(found):
            if not all(0 <= length <= self.most for row in table for length in row):
                raise PeerError(
                    f"another worker, rank {rank}, announces a compressed gradient of an impossible length", SAME
                )
        return found
