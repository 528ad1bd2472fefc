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
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagerun.base.errors import AGAIN, PeerError
from stagerun.comm.spans import Spans
from stagerun.system.pulse import Pulse
from stagerun.system.world import STORE_FILE, World

# Longest silence of a collective before the peers are given up, whoever is to blame, where no monitor watches the ranks. It covers what
# one rank does while the others wait: rank 0 verifying a snapshot, making synthetic images.
TIMEOUT = timedelta(minutes=30)
# Where the monitors (`stagerun.launch.watch`) see to it, which know more: they may have learned to wait for longer, and a job that was
# suspended over a weekend goes on. Also where the user wants no time-outs. Below what milliseconds in 32 bits can hold.
PATIENT = timedelta(days=7)
GRADIENTS = "add up gradients"
# What gloo does best with few ranks: its all-gather, which copies what it gets once more, takes two to three times as long.
MOST_BROADCASTS = 16


@dataclass(slots=True)
class Traffic:
    """Bytes of gradients that this rank has handed to the network, without what the network adds. A ring of W ranks sends each number
    2 (W - 1) / W times; what all ranks get is counted once for each of the others."""

    sent: int = 0
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, size: int) -> None:
        """From any thread."""
        with self._adding:
            self.sent += size


class Comm:
    """A job's collectives. As they stand here they are those of one worker, where nothing crosses a network."""

    rank = 0
    size = 1
    spans: Spans | None = None  # where it is noted how long gradients are on their way; None: nowhere

    def __init__(self, pulse: Pulse | None = None) -> None:
        self.pulse, self.traffic = pulse or Pulse(), Traffic()  # this rank's signs of life

    def part(self, ranks: Sequence[int]) -> "Comm | None":
        """These `ranks`, in growing order, as a job of their own, on them; None on the others. Collective over all. Only `close` of the whole
        ends it."""
        return self

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        """Starts summing `tensor` over the ranks in place; the answer waits for it. The sum has the same bits on each rank.

        `doing` is what an error says was tried. A profile shows sums of gradients alone.
        """
        return _nothing

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        """Starts handing out `sent`, cut into a piece for each rank, and filling `received` with what each rank has for this one;
        the answer waits for it. Both are contiguous vectors; the sizes are in elements, by rank, and may be 0."""
        received.copy_(sent)
        return _nothing

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        """Starts filling `pieces`, contiguous and as large everywhere: piece r is rank r's, and may be empty; the answer waits for it."""
        return _nothing

    def look(self, tensor: Tensor) -> list[Any]:
        """The numbers of a tensor that came of a collective. On a GPU the answers above only queue what comes after them, and this
        is where the host waits for the other workers."""
        return tensor.tolist()  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """`tensor` of rank `src` on every rank, in place."""

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """`data` of rank `src`; the others pass None."""
        assert data is not None
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Everyone's `data`, by rank, on every rank."""
        return [data]

    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def close(self) -> None:
        """Leaves the group, at the end of a job without error."""


class SoloComm(Comm):
    """A job of one worker."""


def gather_json(comm: Comm, mine: Any) -> list[Any]:
    """Everyone's, by rank, on every rank, as JSON holds it. Collective."""
    return [json.loads(data) for data in comm.gather_bytes(json.dumps(mine).encode())]


def _nothing() -> None:
    pass


class TorchComm(Comm):
    """torch.distributed's default group: gloo for tensors on the CPU, NCCL for those on a GPU. No method takes more calls of torch's for
    more ranks."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        pulse: Pulse | None = None,
        timeout: timedelta = TIMEOUT,
        backend: str = "",
    ) -> None:
        """Joins the meeting point in MASTER_ADDR and MASTER_PORT. PeerError if the others don't come. `backend`: another of torch's."""
        super().__init__(pulse)
        self.rank, self.size, self.device, self.timeout = world.rank, world.size, device, timeout
        self.group: dist.ProcessGroup | None = None  # the default group
        self.ranks: Sequence[int] = range(world.size)  # of the default group, by rank of this one
        self._parts: dict[tuple[int, ...], dist.ProcessGroup] = {}
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        with peers("meet the other workers", self.pulse):
            store = private()
            self._served = served(world) if store is None else None
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)

    def part(self, ranks: Sequence[int]) -> Comm | None:
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
        return part

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        with peers(doing):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if doing == GRADIENTS:
            self.traffic.add(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self._waiting([work], tensor.nbytes, doing)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        with peers(GRADIENTS):
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), self.group, True)
        self.traffic.add((sum(sent_sizes) - sent_sizes[self.rank]) * sent.element_size())
        return self._waiting([work], sent.nbytes)

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        own = pieces[self.rank]
        if self.size > MOST_BROADCASTS:
            received = own.new_empty(sum(map(len, pieces)))
            wait = self.exchange(own.repeat(self.size), [len(own)] * self.size, received, [len(p) for p in pieces])

            def fill() -> None:
                wait()
                torch._foreach_copy_(list(pieces), list(received.split([len(piece) for piece in pieces])))

            return fill
        with peers(GRADIENTS):  # all at once
            works = [
                dist.broadcast(piece, self.ranks[r], self.group, True)
                for r, piece in enumerate(pieces)
                if piece.numel()
            ]
        self.traffic.add((self.size - 1) * own.nbytes)
        return self._waiting(works, sum(piece.nbytes for piece in pieces))

    def look(self, tensor: Tensor) -> list[Any]:
        with peers(GRADIENTS, self.pulse):
            return super().look(tensor)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        with peers("hand out a tensor", self.pulse):
            dist.broadcast(tensor, self.ranks[src], self.group)
            self._settle()

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        size = torch.tensor([len(data) if data is not None else 0])
        self.broadcast(size, src)
        buffer = torch.frombuffer(bytearray(data or bytes(int(size))) or bytearray(1), dtype=torch.uint8)
        self.broadcast(buffer, src)
        return buffer.numpy().tobytes()[: int(size)]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        longest = torch.frombuffer(bytearray(data.ljust(max(*sizes, 1), b"\0")), dtype=torch.uint8)
        found = zip(self._gather(longest), sizes, strict=True)
        return [row.numpy().tobytes()[:size] for row, size in found]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        """Everyone's, which are as large, in the host's memory."""
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with peers("hear of the other workers", self.pulse):
            dist.all_gather(found, mine, self.group)
        return found

    def barrier(self) -> None:
        # Not dist.barrier(): with NCCL that would meet on the GPU and need one to be chosen.
        with peers("wait for the other workers", self.pulse):
            dist.all_reduce(torch.zeros(1), group=self.group)

    def close(self) -> None:
        dist.destroy_process_group()

    def _waiting(self, works: Sequence[dist.Work], size: int, doing: str = GRADIENTS) -> Callable[[], None]:
        """A function that returns when the collectives are done, which have to do with so many bytes of this rank's. On a GPU it only
        queues what comes after them, but in a profile."""
        arrived = self.spans.reduction(size) if self.spans is not None and doing == GRADIENTS else None
        on_gpu = self.device.type != "cpu"
        if arrived is not None and not on_gpu:
            # By the threads that bring them to their ends, mostly while this one is computing; the last of them takes the 0.
            left = list(range(len(works)))
            for work in works:
                work.get_future().add_done_callback(lambda _: arrived() if left.pop() == 0 else None)

        def wait() -> None:
            with peers(doing, self.pulse):
                for work in works:
                    work.wait()
                if arrived is not None:
                    self._settle()
            if arrived is not None and on_gpu:  # the GPU knows when; this thread only that it was before
                arrived()

        return wait

    def _settle(self) -> None:
        """On a GPU a collective only queues what comes after it: a rank that hangs there is to be seen waiting for the others."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


@contextmanager
def peers(doing: str, pulse: Pulse | None = None, whom: str = "the other workers") -> Iterator[None]:
    """Turns the RuntimeError of a collective whose peer is gone into PeerError, and leaves any other as it is. With `pulse` this rank waits
    for the others meanwhile; only the training thread does."""
    if pulse is not None:
        pulse.wait()
    try:
        yield
    except RuntimeError as error:
        if not misses_a_peer(error):
            raise
        raise PeerError(f"lost {whom} while trying to {doing}: {first_words(error)}", AGAIN) from error
    finally:
        if pulse is not None:
            pulse.go_on()


# -- the job's store, in which its workers meet: our launcher's file where all are on one machine, else a server in rank 0 or in torchrun


def private() -> dist.Store | None:
    """The file in which workers of one machine meet; None where they meet over a network. RuntimeError."""
    path = Path(os.environ.get("STAGERUN_REPORT_DIR", ""), STORE_FILE)
    return dist.FileStore(str(path)) if "STAGERUN_REPORT_DIR" in os.environ and path.exists() else None


def served(world: World) -> dist.TCPStore | None:
    """On rank 0, the server of the job's store, where no launcher serves it and this host has the address that the others reach; it lives as
    long as what is returned. Else None, and torch's own server listens on all interfaces. A name may mean another address on another host."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdecimal():
        return None
    try:
        if world.local_size < world.size:
            ipaddress.ip_address(address)
        family, *_, place = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place, family=family)
        number = listener.getsockname()[1]
        # `multi_tenant`: a process has one server per port, whoever of torch's wants it.
        return dist.TCPStore(
            address, number, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError, ValueError):
        return None


# How gloo, NCCL and the store say that another process is gone, and what is the matter with this one alone.
_GONE = re.compile(r"gloo/|nccl|connect|socket|broken pipe|peer|pair|timed out|timeout|stop_waiting", re.I)
_HERE = re.compile(r"out of memory|allocate memory|cuda (error|failure)|open files|no space left", re.I)


def misses_a_peer(error: RuntimeError) -> bool:
    """Whether a collective, or a call of the store, failed because another process is gone or out of reach."""
    if isinstance(error, torch.OutOfMemoryError) or _HERE.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or _GONE.search(str(error)) is not None


# What gloo writes around what happened: a place in its source, and advice that the hint above gives, too.
_PLACE, _ADVICE = re.compile(r"\[\S+:\d+\]\s*"), ". This is typically caused by"


def first_words(error: Exception) -> str:
    """What happened, of an error of torch's."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _PLACE.sub("", lines[0]).partition(_ADVICE)[0]
