"""`method: LOSSLESS`: gradients cross the network in fewer bytes, and their sum has the bits that it has without.

`coded(comm)` is a Comm whose float32 vectors are coded (`stagerun.comm.planes`) on their way; everything else it leaves to `comm`. A
sum of float32 is that of gloo's ring (`coded_steps.ring_sum`), on a GPU too: NCCL's order of adding depends on the machines, and only with
two workers are its bits the same.

A thread codes and sends, since the lengths of what comes have to be known first: one collective after the other, in the order in which
they were called, so that all ranks send the same. While one is on the wire, the thread codes the next and decodes the one before.
Lengths go over connections of their own, past what is on the wire. A sum is two collectives, pieces to their owners and sums to
all; the second is queued when the next sum begins, or when it is waited for. So the wire has something to do meanwhile.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from stagerun.base.spans import Spans
from stagerun.comm.coded_steps import Collect, Complete, Exchange, HandOut, Link, Plain, Step
from stagerun.comm.group import GRADIENTS, Comm
from stagerun.comm.jobs import Background
from stagerun.comm.planes import Codec
from stagerun.system.pulse import Pulse

# A smaller vector is sent as it is: to send its lengths first would take longer.
LEAST_BYTES = 64 << 10
THREAD = "coded gradients"


def coded(comm: Comm) -> Comm:
    """`comm`, with gradients coded. Collective. ImportError if zstandard is missing."""
    return comm if comm.size == 1 else CodedComm(comm)


class CodedComm:
    """Beside it `comm` itself may be used only while none of these collectives is under way."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.pulse, self.traffic = comm, comm.pulse, comm.traffic
        self._owed: HandOut | None = None  # the second half of the last sum
        self._begin()

    def _begin(self) -> None:
        self.rank, self.size = self.comm.rank, self.comm.size
        self._wire = _Wire(self.comm)
        self._jobs = Background(THREAD, self._wire.land)

    @property
    def workers(self) -> Sequence[int]:
        return self.comm.workers

    @property
    def spans(self) -> Spans | None:
        return self.comm.spans

    @spans.setter
    def spans(self, spans: Spans | None) -> None:
        self.comm.spans = spans

    def all_reduce(self, tensor: Tensor, doing: str = GRADIENTS) -> Callable[[], None]:
        if tensor.dtype != torch.float32 or tensor.nbytes < LEAST_BYTES:
            return self._put(Plain(lambda comm: comm.all_reduce(tensor, doing), tensor), doing=doing)
        collect = Collect(tensor.view(-1), self.rank, self.size)
        self._put(collect)
        self._settle()
        self._owed = HandOut(collect)
        return self._wait(self._owed, doing)

    def exchange(
        self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]
    ) -> Callable[[], None]:
        self._settle()
        if sent.dtype != torch.float32:
            return self._put(Plain(lambda comm: comm.exchange(sent, sent_sizes, received, received_sizes), sent))
        return self._put(Exchange(sent, sent_sizes, received, received_sizes, self.rank))

    def complete(self, pieces: Sequence[Tensor]) -> Callable[[], None]:
        self._settle()
        if pieces[0].dtype != torch.float32 or sum(piece.nbytes for piece in pieces) < LEAST_BYTES:
            return self._put(Plain(lambda comm: comm.complete(pieces), pieces[0]))
        return self._put(Complete(pieces, self.rank))

    def without(self, gone: Collection[int]) -> None:
        self._owed = None  # a sum that those that are gone had a part in
        self.comm.without(gone)
        self._begin()

    def twin(self) -> Comm:
        self._idle()
        return self.comm.twin()

    def first(self, size: int) -> Comm | None:
        return self.part(range(size))

    def part(self, ranks: Sequence[int]) -> Comm | None:
        self._idle()
        part = self.comm.part(ranks)
        if part is None or part is self.comm:
            return None if part is None else self
        return coded(part)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        self._idle()
        self.comm.broadcast(tensor, src)

    def broadcast_bytes(self, data: bytes | None, src: int = 0) -> bytes:
        self._idle()
        return self.comm.broadcast_bytes(data, src)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        self._idle()
        return self.comm.gather_bytes(data)

    def barrier(self) -> None:
        self._idle()
        self.comm.barrier()

    def close(self) -> None:
        self._idle()
        self.comm.close()

    def _put(self, step: Step, doing: str = GRADIENTS) -> Callable[[], None]:
        self._jobs.put(partial(self._wire.start, step))
        return self._wait(step, doing)

    def _settle(self) -> None:
        """Queues what is owed. Called where all ranks call it at the same place among their collectives."""
        if self._owed is not None:
            self._jobs.put(partial(self._wire.start, self._owed))
            self._owed = None

    def _idle(self) -> None:
        """Returns when all that was started is done, or raises its error."""
        self._settle()
        self._put(Plain(lambda comm: lambda: None, None), doing="")()

    def _wait(self, step: Step, doing: str) -> Callable[[], None]:
        if self.comm.spans is not None and doing == GRADIENTS and not isinstance(step, Collect):
            step.arrived = self.comm.spans.reduction(step.size)

        def wait() -> None:
            if step is self._owed:
                self._settle()
            self.pulse.wait()
            try:
                step.done.wait()
            finally:
                self.pulse.go_on()
            if step.error is not None:
                raise step.error

        return wait


class _Wire:
    """What the thread does, and all that it knows: it ends when nobody uses the CodedComm any more."""

    def __init__(self, comm: Comm) -> None:
        # Only the thread that trains gives signs of life, and what is noted of a sum covers coding.
        quiet = copy.copy(comm)
        quiet.pulse, quiet.spans = Pulse(), None
        self.link = Link(quiet, comm.twin(), Codec())
        self.sending: tuple[Step, Callable[[], None]] | None = None  # the step on the wire, and what waits for it
        self.error: Exception | None = None  # after which nothing is sent any more
        self.stream: torch.cuda.Stream | None = None

    def start(self, step: Step) -> None:
        if self.sending is not None and step.after is self.sending[0]:
            self.land()
        started = None
        try:
            if self.error is None:
                with self._beside(step):
                    started = step, step.start(self.link)
        except Exception as error:
            self.error = error
        self.land()
        self.sending = started
        if started is None:
            step.end(self.error)

    def land(self) -> None:
        """Waits for what is on the wire, and decodes it."""
        if self.sending is None:
            return
        step, wait = self.sending
        self.sending = None
        try:
            with self._beside(step):
                wait()
                step.finish(self.link.codec)
                if self.stream is not None:
                    self.stream.synchronize()
        except Exception as error:
            self.error = self.error or error
            step.end(error)
        else:
            step.end(None)

    def _beside(self, step: Step) -> AbstractContextManager[object]:
        """Within it a GPU works in a stream of this thread, after what had been queued when the step was made."""
        if step.ready is None:
            return nullcontext()
        if self.stream is None:
            self.stream = torch.cuda.Stream(step.device)
        self.stream.wait_event(step.ready)
        return torch.cuda.stream(self.stream)
