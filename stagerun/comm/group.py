"""The workers of the job as one object, `Comm`: rank, size and the few collectives that the package needs.

Every method is collective: all ranks call it, in the same order. A lost peer becomes PeerError. Nothing is pickled: tensors and bytes
cross the network.
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

# The timeout of a collective if no monitor watches the ranks. It covers the work of one rank while the others wait: rank 0 verifying a
# snapshot, making synthetic images.
TIMEOUT = timedelta(minutes=30)
# The timeout if monitors (`stagerun.launch.monitor`) watch: they may have learned to wait for longer, and a job that was suspended over a
# weekend resumes. Also if the user wants no timeouts. Milliseconds in 32 bits can hold it.
PATIENT = timedelta(days=7)
GRADIENTS = "add up gradients"
Wait = Callable[[], None]  # returns when what was started has arrived
# With few ranks broadcasts are gloo's fastest: its all-gather, which copies the result once more, takes two to three times as long.
MOST_BROADCASTS = 16


@dataclass(slots=True)
class Traffic:
    """Bytes of gradients that this rank has handed to the network, without overhead. A ring of W ranks sends each number 2 (W - 1) / W
    times; a broadcast counts once for each other rank."""

    sent: int = 0
    _adding: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, size: int) -> None:
        """Add `size`. For any thread."""
        with self._adding:
            self.sent += size


class Comm:
    """A job's collectives; in this class for one worker, without a network."""

    rank = 0
    size = 1
    spans: Spans | None = None  # of a profile: notes how long gradients are on their way

    def __init__(self, pulse: Pulse | None = None) -> None:
        self.pulse, self.traffic = pulse or Pulse(), Traffic()  # this rank's signs of life

    def part(self, ranks: Sequence[int]) -> "Comm | None":
        """Return these `ranks`, in growing order, as a separate job; None on the other ranks. Collective over all. Only `close` of the whole
        ends it."""
        return self

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Wait:
        """Start summing `tensor` over the ranks in place; the answer waits for it. The sum has the same bits on each rank.

        `doing` is for errors. A profile shows sums of gradients alone."""
        return _nothing

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Wait:
        """Start handing out `sent`, cut into a piece for each rank, and filling `received` with each rank's piece for this one;
        the answer waits for it. Both are contiguous vectors; the sizes are in elements, by rank, and may be 0."""
        received.copy_(sent)
        return _nothing

    def complete(self, pieces: Sequence[Tensor]) -> Wait:
        """Start filling `pieces`, contiguous and as large on all ranks: piece r is rank r's, and may be empty; the answer waits for it."""
        return _nothing

    def look(self, tensor: Tensor) -> list[Any]:
        """Return the numbers of a tensor computed by a collective. On a GPU the answers above only queue what follows, and here the host
        waits for the other workers."""
        return tensor.tolist()  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Copy `tensor` of rank `src` to every rank, in place."""

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        """Return `data` of rank `src`; the others pass None."""
        assert data is not None
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return all ranks' `data`, by rank, on every rank."""
        return [data]

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def close(self) -> None:
        """Leave the group, at the end of a job without error."""


class SoloComm(Comm):
    """A job of one worker."""


def gather_json(comm: Comm, value: Any) -> list[Any]:
    """Return all ranks' values, by rank, on every rank, through JSON. Collective."""
    return [json.loads(data) for data in comm.gather_bytes(json.dumps(value).encode())]


def _nothing() -> None:
    pass


class TorchComm(Comm):
    """torch.distributed's default group: gloo for tensors on the CPU, NCCL on a GPU. No method takes more calls of torch's for more ranks."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        pulse: Pulse | None = None,
        timeout: timedelta = TIMEOUT,
        backend: str = "",
    ) -> None:
        """Join the meeting point in MASTER_ADDR and MASTER_PORT. PeerError if other workers are missing. `backend`: another of torch's."""
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
        # Only the whole job has parts.
        key = tuple(ranks)
        if key == tuple(range(self.size)):
            return self
        # A group is kept: a stage that starts again takes the same.
        if len(key) > 1 and key not in self._parts:
            self._parts[key] = dist.new_group(list(key), timeout=self.timeout)
        if self.rank not in key:
            return None
        if len(key) == 1:
            return SoloComm(self.pulse)
        part = copy.copy(self)
        part.rank, part.size, part.group, part.ranks = key.index(self.rank), len(key), self._parts[key], key
        return part

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Wait:
        with peers(doing):
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
        if doing == GRADIENTS:
            self.traffic.add(2 * (self.size - 1) * tensor.nbytes // self.size)
        return self._waiting([work], tensor.nbytes, doing)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Wait:
        with peers(GRADIENTS):
            work = dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes), self.group, True)
        self.traffic.add((sum(sent_sizes) - sent_sizes[self.rank]) * sent.element_size())
        return self._waiting([work], sent.nbytes)

    def complete(self, pieces: Sequence[Tensor]) -> Wait:
        piece, sizes = pieces[self.rank], list(map(len, pieces))
        if self.size > MOST_BROADCASTS:
            received = piece.new_empty(sum(sizes))
            wait = self.exchange(piece.repeat(self.size), [len(piece)] * self.size, received, sizes)

            def fill() -> None:
                wait()
                torch._foreach_copy_(list(pieces), list(received.split(sizes)))

            return fill
        with peers(GRADIENTS):  # all at once
            works = [dist.broadcast(p, self.ranks[r], self.group, True) for r, p in enumerate(pieces) if p.numel()]
        self.traffic.add((self.size - 1) * piece.nbytes)
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
        return [row.numpy().tobytes()[:size] for row, size in zip(self._gather(longest), sizes, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """Return all ranks' tensors, of one size, in the host's memory."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with peers("hear from the other workers", self.pulse):
            dist.all_gather(gathered, tensor, self.group)
        return gathered

    def barrier(self) -> None:
        # Not dist.barrier(): with NCCL that would meet on the GPU and need one to be chosen.
        with peers("wait for the other workers", self.pulse):
            dist.all_reduce(torch.zeros(1), group=self.group)

    def close(self) -> None:
        dist.destroy_process_group()

    def _waiting(self, works: Sequence[dist.Work], size: int, doing: str = GRADIENTS) -> Wait:
        """Return a function that waits for the collectives, which send `size` bytes of this rank. On a GPU it only queues what follows,
        except in a profile."""
        arrived = self.spans.reduction(size) if self.spans is not None and doing == GRADIENTS else None
        on_gpu = self.device.type != "cpu"
        if arrived is not None and not on_gpu:
            # Called by the threads that end the collectives, mostly while this one computes; the last of them takes the 0.
            left = list(range(len(works)))
            for work in works:
                work.get_future().add_done_callback(lambda _: arrived() if left.pop() == 0 else None)

        def wait() -> None:
            with peers(doing, self.pulse):
                for work in works:
                    work.wait()
                if arrived is not None:
                    self._settle()
            if arrived is not None and on_gpu:
                arrived()

        return wait

    def _settle(self) -> None:
        """Wait for the GPU, where a collective only queues what follows, so that a rank that hangs in one shows as waiting for the others."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


# Messages of gloo, NCCL and the store: another process is gone; this one has failed.
_GONE = re.compile(r"gloo/|nccl|connect|socket|broken pipe|peer|pair|timed out|timeout|stop_waiting", re.I)
_HERE = re.compile(r"out of memory|allocate memory|cuda (error|failure)|open files|no space left", re.I)


# gloo adds a line of its source, and advice that the hint above gives, too.
_SOURCE, _ADVICE = re.compile(r"\[\S+:\d+\]\s*"), ". This is typically caused by"


@contextmanager
def peers(doing: str, pulse: Pulse | None = None, whom: str = "the other workers") -> Iterator[None]:
    """Turn the RuntimeError of a collective whose peer is gone into PeerError; any other passes. With `pulse`, for the training thread, show
    this rank as waiting for the others meanwhile."""
    if pulse is not None:
        pulse.wait()
    try:
        yield
    except RuntimeError as error:
        text = str(error).strip()
        if isinstance(error, torch.OutOfMemoryError) or _HERE.search(text):
            raise
        if not isinstance(error, dist.DistError) and _GONE.search(text) is None:
            raise
        first = (text or type(error).__name__).splitlines()[0]
        essence = _SOURCE.sub("", first).partition(_ADVICE)[0]
        raise PeerError(f"lost {whom} while trying to {doing}: {essence}", AGAIN) from error
    finally:
        if pulse is not None:
            pulse.go_on()


# -- the job's store, in which its workers meet: the launcher's file if all are on one machine, else a server in rank 0 or in torchrun


def private() -> dist.Store | None:
    """Return the file in which workers of one machine meet; None if they meet over a network. RuntimeError."""
    path = Path(os.environ.get("STAGERUN_REPORT_DIR", ""), STORE_FILE)
    return dist.FileStore(str(path)) if "STAGERUN_REPORT_DIR" in os.environ and path.exists() else None


def served(world: World) -> dist.TCPStore | None:
    """Start the server of the job's store, on rank 0, if no launcher serves it and this host has the address that the others reach. It lives
    as long as the answer. Else return None: torch's server then listens on all interfaces. A name may mean another address on another host."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdecimal():
        return None
    try:
        if world.local_size < world.size:
            ipaddress.ip_address(address)
        family, *_, endpoint = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(endpoint, family=family)
        number = listener.getsockname()[1]
        # `multi_tenant`: a process has one server per port, for all parts of torch.
        return dist.TCPStore(
            address, number, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError, ValueError):
        return None
