"""Compressed gradients (`compress_param`): every sender's message goes to every rank, and all ranks add them up in the same order.

A sender is a worker with `determinism: FIXED`, a logical worker with ELASTIC: so the sum has the same bits on every rank, and with
ELASTIC for any number of workers. c = gradient + residual is compressed, and what its message lacks is the next residual. That takes
the place of the old one only when the update is made (`accept`): an iteration that is broken off, or whose gradients are not
finite, leaves residuals as they were.

A thread compresses and sends one chunk after the other while backward goes on. Collectives start in the order of the chunks, whatever
the timing: that order must be the same on all ranks.
"""

import copy
import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagerun.base.errors import PeerError
from stagerun.comm import Comm
from stagerun.comm.reduce import FlatReducer, Reducer, Switch, views_of
from stagerun.system.pulse import Pulse
from stagerun.wire.holding import slice_sum
from stagerun.wire.messages import Item, Kept
from stagerun.wire.operators import Draw, Operator, Steps, by_pieces, joined

SAME = "run the same stagerun on all hosts, and the same command again: it goes on from the newest snapshot"


class Residual:
    """What each sender of this rank has not sent yet: one vector per sender, with the last registered parameter first. `bases`: what
    operators remember that is the same on all ranks, by parameter, zeros before the first update that is compressed.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        runs: Sequence[range],
        rank: int,
        bases: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """`parameters` are those that are trained, in model order; `runs[r]` the senders of rank r, contiguous; `bases` the shapes."""
        self.runs, self.own, self.senders = runs, runs[rank], runs[-1].stop
        self.parameters = dict(reversed(list(parameters.items())))
        first = next(iter(parameters.values()))
        self.empty = torch.empty(sum(p.numel() for p in parameters.values()), dtype=first.dtype, device=first.device)
        self.vectors = [torch.zeros_like(self.empty) for _ in self.own]
        self.bases = {name: self.empty.new_zeros(shape) for name, shape in (bases or {}).items()}

    def by_name(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a sender's vector by parameter."""
        return dict(zip(self.parameters, views_of(vector, list(self.parameters.values())), strict=True))

    def room(self, sender: int) -> Tensor:
        """The vector of an own sender, or one that can take another's."""
        return self.vectors[sender - self.own.start] if sender in self.own else self.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How messages are cut. `seed`: of their random numbers. `each`: senders are logical workers. `whole`: the last so many parameters
    make one message, by the operator of the last."""

    seed: int
    each: bool = False
    whole: int = 0


class CompressedReducer(FlatReducer):
    """`flat` is the sum. The gradients of each sender of this rank lie in a vector of its own, which becomes its next residual."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        operators: Sequence[Operator],
        comm: Comm,
        runs: Sequence[range],
        cut: Cut,
        residual: Residual | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`operators`: of each of the `parameters`, which are in model order. `runs[r]`: the senders of rank r. `kept` is for rank 0."""
        self.runs, self.own, self.cut = runs, runs[comm.rank], cut
        self.kinds = list(reversed(list(zip(parameters, operators, strict=True))))  # name and operator
        self.residual, self.iter, self.kept = residual, 0, kept or Kept()
        self.items: list[list[Item]] = []  # of each chunk
        super().__init__(list(parameters.values()), comm)
        self.sums = self.views  # places in `flat`; `views` are those in the vector of the sender whose gradients come
        self.vectors = [torch.zeros_like(self.flat) for _ in self.own]
        self.now = 0  # that sender
        self.tails: list[Tensor] = []
        self.total = torch.empty(0)
        self.jobs = Jobs()
        # Waiting is the training thread's to report; what this one waits for lies behind `finish`.
        self.beside = copy.copy(comm)
        self.beside.pulse = Pulse()
        self.left: list[Callable[[], None]] = []
        self.bases = residual.bases if residual is not None else {}
        self.next_bases: dict[str, Tensor] = {}  # once this update is made

    def _counts(self, ordered: list[nn.Parameter]) -> list[int]:
        counts = super()._counts(ordered[self.cut.whole :]) if self.cut.whole < len(ordered) else []
        counts = [self.cut.whole, *counts] if self.cut.whole else counts
        start = index = 0
        for count in counts:
            members = ordered[index : index + count]
            lengths = [sum(p.numel() for p in members)] if index < self.cut.whole else [p.numel() for p in members]
            items = []
            for n, length in enumerate(lengths, index):
                name, operator = self.kinds[n]
                items.append(Item("entire model" if n < self.cut.whole else name, n, operator, start, start + length))
                start += length
            self.items.append(items)
            index += count
        return counts

    def begin(self, iter: int = 0) -> None:
        super().begin(iter)
        self.beside.spans = self.comm.spans  # a profile comes and goes
        self.iter, self.tails, self.left, self.next_bases = iter, [], [], {}
        self.kept.begin(iter)

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self._take_up(logical_worker - self.own.start if self.cut.each else 0, tail)
        if last:
            self._arm()
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        # As `add` of the last logical worker: the tails first, then, in `finish`, all chunks in their order, whatever is in them.
        self._take_up(len(self.own) - 1, tail)
        self._arm()

    def _take_up(self, sender: int, tail: Tensor) -> None:
        """What comes now is of this rank's `sender`."""
        if not self.tails:
            self.tails, self.now = [torch.zeros_like(tail) for _ in self.own], -1
        self.tails[sender].add_(tail)
        while self.now < sender:
            if self.now >= 0:
                self._fill()
            self.now += 1
            ordered = [p for p, _ in self.sums]
            self.views = list(zip(ordered, views_of(self.vectors[self.now], ordered), strict=True))
            self.placed = [False] * len(self.sums)
            for p, _ in self.views:
                p.grad = None

    def _send_tail(self) -> None:
        self.jobs.put(self._add_tails)

    def _send(self) -> None:
        chunk = self.sent
        self.jobs.put(lambda: self._compress(chunk))
        self.sent += 1

    def finish(self) -> Tensor:
        self.armed = self.active = False
        self._fill()
        while self.sent < len(self.chunks):
            self._send()
        self.jobs.put(self._decode)
        self.comm.pulse.wait()
        try:
            self.jobs.wait()
        finally:
            self.comm.pulse.go_on()
        for p, view in self.sums:
            p.grad = view
        self.views = self.sums
        return self.total

    def accept(self) -> None:
        self.bases |= self.next_bases
        if self.residual is not None:
            self.vectors, self.residual.vectors = self.residual.vectors, self.vectors

    # -- the jobs, in this order: tails, then each chunk; the answers to a chunk are decoded when the next one is on its way

    def _add_tails(self) -> None:
        size = self.tails[0].nbytes
        received = self._share([[tail.view(torch.uint8) for tail in self.tails]], [size])()
        self.total = received[0][0].clone().view(torch.float64)
        for other in received[0][1:]:
            self.total.add_(other.clone().view(torch.float64))

    def _compress(self, chunk: int) -> None:
        items = self.items[chunk]
        start, stop = items[0].start, items[-1].stop
        if self.residual is not None:
            for vector, left in zip(self.vectors, self.residual.vectors, strict=True):
                by_pieces(Tensor.add_, vector[start:stop], left[start:stop])
        waiting = []
        for dtype in dict.fromkeys(item.operator.wire(self.flat.dtype) for item in items):
            chosen = [item for item in items if item.operator.wire(self.flat.dtype) is dtype]
            waiting.append(self._gather(chosen) if dtype is None else self._sum(chosen, dtype))
        self._decode()
        self.left = waiting

    def _decode(self) -> None:
        """Adds up what came for the chunk before."""
        left, self.left = self.left, []
        for finish in left:
            finish()

    def _sum(self, items: Sequence[Item], dtype: torch.dtype) -> Callable[[], None]:
        """Numbers that are only rounded: each rank adds up a slice for all, in the order of the senders, and hands the sum out: what
        crosses the network grows with the number of senders of a rank, and not with that of ranks."""
        lengths = [item.stop - item.start for item in items]
        width = -(-sum(lengths) // self.comm.size)
        sent = self.flat.new_zeros((len(self.own), self.comm.size * width), dtype=dtype)
        for sender, (row, vector) in enumerate(zip(sent, self.vectors, strict=True)):
            for item, part in zip(items, row[: sum(lengths)].split(lengths), strict=True):
                c = vector[item.start : item.stop]
                if self.kept.due and sender == 0:
                    self.kept.sent(item, c, c.numel() * dtype.itemsize, c - c.to(dtype).to(c.dtype))
                by_pieces(Tensor.copy_, part, c)
                if self.residual is not None:
                    by_pieces(Tensor.zero_, c)

        def total(slices: Sequence[Tensor]) -> Tensor:
            found = self.flat.new_zeros(width)
            for one in slices:
                by_pieces(Tensor.add_, found, one)
            return found.to(dtype)

        wait = slice_sum(self.beside, sent, [len(run) for run in self.runs], total)

        def finish() -> None:
            for item, part in zip(items, wait()[: sum(lengths)].split(lengths), strict=True):
                by_pieces(Tensor.copy_, self.flat[item.start : item.stop], part)

        return finish

    def _gather(self, items: Sequence[Item]) -> Callable[[], None]:
        """Every rank gets every sender's message of each item."""
        rounds, messages = [], []
        for item in items:
            own = [vector[item.start : item.stop] for vector in self.vectors]
            draw = Draw(self.cut.seed, self.iter, -1, item.number)
            out = self.flat[item.start : item.stop].zero_()
            basis = self.bases.get(item.name)
            known = basis if basis is not None and bool(basis.any()) else None  # it is drawn before the first update
            rounds.append(item.operator.steps(own, self.own, draw, out, known))
            messages.append(next(rounds[-1]))
            if self.kept.due:
                self.kept.encoded(item, own[0], messages[-1][0], draw)
        running = list(zip(items, rounds, strict=True))
        first = self._share(messages, self._sizes(items, 0))

        def finish() -> None:
            arrived, left = first, running
            for round in itertools.count(1):
                answers = zip(left, arrived(), strict=True)
                # Operators that have another round, and what they send in it.
                more = [(one, sent) for one, got in answers if (sent := self._following(*one, got)) is not None]
                if not more:
                    return
                left = [one for one, _ in more]
                arrived = self._share([sent for _, sent in more], self._sizes([item for item, _ in left], round))

        return finish

    def _sizes(self, items: Sequence[Item], round: int) -> list[int | None]:
        return [item.operator.sizes(item.stop - item.start, self.flat.element_size())[round] for item in items]

    def _following(self, item: Item, steps: Steps, received: list[Tensor]) -> list[Tensor] | None:
        """The messages of the next round, after those of one; None after the last."""
        try:
            messages = steps.send(received)
        except StopIteration as end:
            if end.value is not None:
                self.next_bases[item.name] = end.value
            own = [vector[item.start : item.stop] for vector in self.vectors]
            if self.kept.due and item.operator.residual:
                self.kept.left(item, own[0])
            if self.residual is not None and not item.operator.residual:
                for vector in own:
                    vector.zero_()
            return None
        except (ValueError, IndexError) as error:
            text = f"another worker sent what is not a compressed gradient of `{item.name}`: {error}"
            raise PeerError(text, SAME) from error
        if self.kept.due:
            self.kept.one_more(item, messages[0])
        return messages

    # -- messages, from every sender to every rank; a rank has one sender or several, or none

    def _share(self, messages: list[list[Tensor]], sizes: Sequence[int | None]) -> Callable[[], list[list[Tensor]]]:
        """Starts sending the messages, by item and own sender. The answer waits, and has those of all by item and sender.

        `sizes`: the bytes of each item's message, None where only the sender knows.
        """
        by_sender = list(zip(*messages, strict=True))
        lengths = self._lengths(by_sender, sizes)
        buffers = [torch.empty(sum(map(sum, table)), dtype=torch.uint8, device=self.flat.device) for table in lengths]
        if by_sender:
            buffers[self.comm.rank] = joined([message for row in by_sender for message in row])
        wait = self.beside.complete(buffers)

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
        tables = [torch.empty((len(run), len(sizes)), dtype=torch.int64, device=self.flat.device) for run in self.runs]
        if messages:
            mine = torch.tensor([[message.numel() for message in row] for row in messages], dtype=torch.int64)
            tables[self.comm.rank].copy_(mine)
        self.beside.complete([table.view(-1) for table in tables])()
        found = [table.tolist() for table in tables]
        for rank, table in enumerate(found):
            if not all(0 <= length <= self.flat.nbytes for row in table for length in row):
                text = f"another worker, rank {rank}, announces a compressed gradient of an impossible length"
                raise PeerError(text, SAME)
        return found


class From(Switch):
    """`before` for the first iterations of a stage, `after` from `start` on."""

    def __init__(self, start: int, before: Reducer, after: Reducer) -> None:
        super().__init__(before)
        self.start, self.after = start, after

    def begin(self, iter: int = 0) -> None:
        if iter >= self.start:
            self.now = self.after  # which frees the other one's buffers
        super().begin(iter)


class Jobs:
    """Done one after the other, in a thread. The thread ends with this object; the process doesn't wait for it: a peer may never answer."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=_work, args=(self._jobs,), name="compress", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, job: Callable[[], None]) -> None:
        def careful() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised by `wait`, in the thread that trains
                    self._error = error

        self._jobs.put(careful)

    def wait(self) -> None:
        """Returns when all that was put is done, or raises the first error of a job; those after it are left out."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


@torch.no_grad()
def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds what holds this thread's end
