"""The workers of the job as one object: who I am, and the few collectives that the rest needs.

`Comm` is the whole surface. Every method but `rank` and `size` is collective: all ranks call it, in the same order.
A peer that is gone becomes PeerError. No objects are pickled: what crosses the network is tensors and bytes.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.errors import PeerError
from stagerun.world import World

# Longest silence of a collective before the peers are given up. It covers what one rank does while the others wait: rank 0
# verifying a snapshot, making synthetic images. While images are copied to scratch the ranks meet once a second.
TIMEOUT = timedelta(minutes=30)


class Comm(Protocol):
    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Starts summing `tensor` over the ranks in place; the answer waits for it. The sum has the same bits on each rank."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """`tensor` of rank `src` on every rank, in place."""

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """`data` of rank `src`; the others pass None."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, by rank, on every rank."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Leaves the group, at the end of a job without error."""


class SoloComm:
    """A job of one worker: nothing to do."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        return lambda: None

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        pass

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        assert data is not None
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class TorchComm:
    """torch.distributed's default group: gloo for tensors on the CPU, NCCL for those on a GPU."""

    def __init__(self, world: World, device: torch.device) -> None:
        """Joins the meeting point in MASTER_ADDR and MASTER_PORT. PeerError if the others don't come."""
        self.rank, self.size, self.device = world.rank, world.size, device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _peers("meet the other workers"):
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT)

    def all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        with _peers("add up gradients"):
            work = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            with _peers("add up gradients"):
                work.wait()

        return wait

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with _peers("hand out a tensor"):
            dist.broadcast(tensor, src)

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        size = torch.tensor([len(data) if data is not None else 0])
        self.broadcast(size, src)
        buffer = torch.frombuffer(bytearray(data or bytes(int(size))) or bytearray(1), dtype=torch.uint8)
        self.broadcast(buffer, src)
        return buffer.numpy().tobytes()[: int(size)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [self.broadcast_bytes(data if self.rank == src else None, src) for src in range(self.size)]

    def barrier(self) -> None:
        # Not dist.barrier(): with NCCL that would meet on the GPU and need one to be chosen.
        with _peers("wait for the other workers"):
            dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        dist.destroy_process_group()


class _peers:
    """Turns the RuntimeError of a collective whose peer is gone into PeerError."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise PeerError(
                f"lost the other workers while trying to {self.doing}: {first}",
                "run the same command again: it goes on from the newest snapshot",
            ) from error
