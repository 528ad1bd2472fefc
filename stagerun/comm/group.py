"""The workers of the job as one object: who I am, and the few collectives that the rest needs.

`Comm` is the whole surface. Every method but `rank` and `size` is collective: all ranks call it, in the same order.
A peer that is gone becomes PeerError. No objects are pickled: what crosses the network is tensors and bytes.
"""

import copy
import ipaddress
import json
import os
import re
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.base.errors import PeerError
from stagerun.base.spans import Spans
from stagerun.system.pulse import Pulse
from stagerun.system.world import World

# Longest silence of a collective before the peers are given up, whoever is to blame, where no monitor watches the ranks. It covers what
# one rank does while the others wait: rank 0 verifying a snapshot, making synthetic images.
TIMEOUT = timedelta(minutes=30)
# Where the monitors (`stagerun.launch.watch`) see to it, which know more: they may have learned to wait for longer, and a job that was
# suspended over a weekend goes on. Also where the user wants no time-outs. Below what milliseconds in 32 bits can hold.
PATIENT = timedelta(days=7)
GRADIENTS = "add up gradients"
AGAIN = "run the same command again: it goes on from the newest snapshot"


@dataclass(slots=True)
class Traffic:
    """Bytes of gradients that this rank has handed to the network, without what the network adds. A ring of W ranks sends each number
    2 (W - 1) / W times; what all ranks get is counted once for each of the others."""

    sent: int = 0


class Comm(Protocol):
    rank: int
    size: int
    traffic: Traffic
    pulse: Pulse  # this rank's signs of life
    spans: Spans | None  # where it is noted how long gradients are on their way; None: nowhere

    def first(self, size: int) -> "Comm | None":
        """The first `size` ranks as a job of their own, on these; None on the others. Collective over all. Only `close` of the
        whole ends it."""

    def twin(self) -> "Comm":
        """The same ranks again, for tensors on the CPU, with an order of collectives of its own: another thread may call them there while
        this one calls them here. Collective; always the same one. Only `close` of the whole ends it."""

    def part(self, ranks: Sequence[int]) -> "Comm | None":
        """The same of any `ranks`, in growing order."""

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        """Starts summing `tensor` over the ranks in place; the answer waits for it. The sum has the same bits on each rank.

        `doing` is what an error says was tried. A profile shows sums of gradients alone.
        """

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Starts handing out `sent`, cut into a piece for each rank, and filling `received` with what each rank has for this one;
        the answer waits for it. Both are contiguous vectors; the sizes are in elements, by rank, and may be 0."""

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        """Starts filling `pieces`, contiguous and as large everywhere: piece r is rank r's, and may be empty; the answer waits for it."""

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


def gather_json(comm: Comm, mine: Any) -> list[Any]:
    """Everyone's, by rank, on every rank, as JSON holds it. Collective."""
    return [json.loads(data) for data in comm.gather_bytes(json.dumps(mine).encode())]


class SoloComm:
    """A job of one worker: nothing to do."""

    rank = 0
    size = 1
    pulse = Pulse()  # that no one reads
    traffic = Traffic()  # stays 0
    spans: Spans | None = None

    def __init__(self, pulse: Pulse | None = None) -> None:
        if pulse is not None:
            self.pulse = pulse

    def first(self, size: int) -> "SoloComm":
        return self

    def twin(self) -> "SoloComm":
        return self

    def part(self, ranks: Sequence[int]) -> "SoloComm":
        return self

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        return lambda: None

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        received.copy_(sent)
        return lambda: None

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
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


def serve(address: str, port: int) -> dist.TCPStore:
    """Starts the server of a job's store, which lives as long as what is returned; `port` 0: any. PeerError.

    It listens at `address` alone; torch's own would listen on all interfaces. `multi_tenant` has torch's rendezvous use it: a process
    has one server per port.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place, family=family)
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        why = os.strerror(number) if number else _first_words(error)
        raise PeerError(f"the workers can't meet at {address}, port {port}: {why}", AGAIN) from error


def _served(world: World) -> dist.TCPStore | None:
    """On rank 0, where no launcher serves the store and this host has the address that the others reach; else None, and torch's own
    server listens on all interfaces. A name may mean another address on another host."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdecimal():
        return None
    try:
        if world.local_size < world.size:
            ipaddress.ip_address(address)
        return serve(address, int(port))
    except (ValueError, PeerError):
        return None


class TorchComm:
    """torch.distributed's default group: gloo for tensors on the CPU, NCCL for those on a GPU."""

    def __init__(
        self, world: World, device: torch.device, pulse: Pulse | None = None, timeout: timedelta = TIMEOUT
    ) -> None:
        """Joins the meeting point in MASTER_ADDR and MASTER_PORT. PeerError if the others don't come."""
        self.rank, self.size, self.device = world.rank, world.size, device
        self.pulse, self.timeout, self.traffic = pulse or Pulse(), timeout, Traffic()
        self.spans: Spans | None = None
        self.group: dist.ProcessGroup | None = None  # the default group
        self._twin: TorchComm | None = None  # as soon as it is asked for
        self.ranks: Sequence[int] = range(world.size)  # of the default group, by rank of this one
        self._parts: dict[tuple[int, ...], dist.ProcessGroup] = {}
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        with _peers("meet the other workers", self.pulse):
            self._served = _served(world)
            dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=timeout)

    def first(self, size: int) -> "TorchComm | SoloComm | None":
        return self.part(range(size))

    def part(self, ranks: Sequence[int]) -> "TorchComm | SoloComm | None":
        # Of the whole job alone: a part has no parts.
        key = tuple(ranks)
        if key == tuple(range(self.size)):
            return self
        # A group is never given back: a stage that starts again takes the same.
        if len(key) > 1 and key not in self._parts:
            self._parts[key] = dist.new_group(list(key), timeout=self.timeout)
        if self.rank not in key:
            return None
        if len(key) == 1:
            return SoloComm(self.pulse)
        part = copy.copy(self)
        part.rank, part.size, part.group, part.ranks = key.index(self.rank), len(key), self._parts[key], key
        part._twin = None
        return part

    def twin(self) -> "TorchComm":
        if self._twin is None:
            twin = copy.copy(self)
            # Only its members call this, which need not be all ranks of the job. Where they are, they must not meet by a name that torch makes from
            # the number of groups a rank is in: parts make that differ.
            with _peers("meet the other workers once more", self.pulse):
                twin.group = dist.new_group(
                    list(self.ranks), self.timeout, "gloo", use_local_synchronization=self.group is not None
                )
            twin.device, twin.pulse, twin.spans = torch.device("cpu"), Pulse(), None
            self._twin = twin
        return self._twin

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        with _peers(doing):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if doing == GRADIENTS:
            self.traffic.sent += 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._waiting([work], tensor.nbytes, doing)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        with _peers(GRADIENTS):
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), self.group, True)
        self.traffic.sent += (sum(sent_sizes) - sent_sizes[self.rank]) * sent.element_size()
        return self._waiting([work], sent.nbytes)

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        # All at once: gloo's all-gather, which copies what it gets once more, takes two to three times as long.
        with _peers(GRADIENTS):
            works = [
                dist.broadcast(piece, self.ranks[r], self.group, True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
        self.traffic.sent += (self.size - 1) * pieces[self.rank].nbytes
        return self._waiting(works, sum(piece.nbytes for piece in pieces))

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with _peers("hand out a tensor", self.pulse):
            dist.broadcast(tensor, self.ranks[src], self.group)
            self._settle()

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
        with _peers("wait for the other workers", self.pulse):
            dist.all_reduce(torch.zeros(1), group=self.group)

    def close(self) -> None:
        dist.destroy_process_group()

    def _waiting(self, works: Sequence[dist.Work], size: int, doing: str = GRADIENTS) -> Callable[[], None]:
        """A function that returns when the collectives are done, which have to do with so many bytes of this rank's."""
        arrived = self.spans.reduction(size) if self.spans is not None and doing == GRADIENTS else None
        if arrived is not None and self.device.type == "cpu":
            # By the threads that bring them to their ends, mostly while this one is computing; the last of them takes the 0.
            left = list(range(len(works)))
            for work in works:
                work.get_future().add_done_callback(lambda _: arrived() if left.pop() == 0 else None)

        def wait() -> None:
            with _peers(doing, self.pulse):
                for work in works:
                    work.wait()
                self._settle()
            if (
                arrived is not None and self.device.type != "cpu"
            ):  # the GPU knows when; this thread only that it was before
                arrived()

        return wait

    def _settle(self) -> None:
        """On a GPU `wait` only queues what comes after; a rank that hangs there is to be seen waiting here, and not at whatever asks
        the GPU for a number first. Reducers wait in `finish` alone, when backward is done, and all that they have sent by then is on
        its way: so what is lost is the time to queue the next kernel."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


# What gloo writes around what happened: a place in its source, and advice that the hint below gives, too.
_PLACE, _ADVICE = re.compile(r"\[\S+:\d+\]\s*"), ". This is typically caused by"


def _first_words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _PLACE.sub("", lines[0]).partition(_ADVICE)[0]


class _peers:
    """Turns the RuntimeError of a collective whose peer is gone into PeerError. With `pulse` this rank waits for the others meanwhile;
    only the training thread does."""

    def __init__(self, doing: str, pulse: Pulse | None = None) -> None:
        self.doing, self.pulse = doing, pulse

    def __enter__(self) -> None:
        if self.pulse is not None:
            self.pulse.wait()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.pulse is not None:
            self.pulse.go_on()
        if isinstance(error, RuntimeError):
            raise PeerError(
                f"lost the other workers while trying to {self.doing}: {_first_words(error)}",
                AGAIN,
            ) from error
