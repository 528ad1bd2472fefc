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
import math
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stagerun.base.errors import PeerError
from stagerun.base.events import CompressedItem
from stagerun.comm import Comm
from stagerun.comm.reduce import FlatReducer, views_of
from stagerun.system.pulse import Pulse
from stagerun.wire.operators import Draw, Operator, Steps, joined, pieces

SAME = "run the same stagerun on all hosts, and the same command again: it goes on from the newest snapshot"


@dataclass(frozen=True, slots=True)
class Item:
    """What one message is made of: a parameter, or all of them. `start` and `stop` cut it out of a vector."""

    name: str
    number: int  # the key of its random numbers
    operator: Operator
    start: int
    stop: int


def by_pieces(do: Callable[..., Tensor], *vectors: Tensor) -> None:
    """On a CPU without torch's threads, which would take the cores of backward."""
    for p in pieces(len(vectors[0]), vectors[0].device):
        do(*(vector[p] for vector in vectors))


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


class Kept:
    """What the messages of sender 0 keep of the gradients that they are made from, in every `every`-th iteration; 0: in none. It looks on: no
    bit depends on it. The reducer calls all but `take`."""

    def __init__(self, every: int = 0) -> None:
        self.every, self.due = every, False
        self._found: dict[int, CompressedItem] = {}  # by the number of the item

    def begin(self, iter: int) -> None:
        """`iter`: updates done in the stage."""
        self._found, self.due = {}, self.every > 0 and (iter + 1) % self.every == 0

    def sent(self, item: "Item", c: Tensor, size: int, lacks: Tensor | None = None) -> None:
        """A message of the first round, of so many bytes. `lacks`: what it leaves out of `c`, where that is known already."""
        lost = None if lacks is None else _norm(lacks)
        self._found[item.number] = CompressedItem(
            name=item.name, norm=_norm(c), residual_norm=lost, kept=None, bytes=size
        )

    def encoded(self, item: "Item", c: Tensor, message: Tensor, draw: Draw) -> None:
        """What it lacks is the residual after the last round (`left`); without one it is found by decoding the message by itself, which of a
        method with more rounds says nothing."""
        operator, out, alone = item.operator, None, c.clone()
        if not operator.residual and len(operator.sizes(c.numel(), c.element_size())) == 1:
            out = torch.zeros_like(c)
            steps = operator.steps([alone], [0], draw, out)
            next(steps)
            with suppress(StopIteration):
                steps.send([message])
        self.sent(item, c, message.numel(), None if out is None else c - out)

    def one_more(self, item: "Item", message: Tensor) -> None:
        """The message of a later round."""
        before = self._found[item.number]
        self._found[item.number] = replace(before, bytes=before.bytes + message.numel())

    def left(self, item: "Item", residual: Tensor) -> None:
        """After the last round, where there is a residual."""
        self._found[item.number] = replace(self._found[item.number], residual_norm=_norm(residual))

    def take(self) -> tuple[CompressedItem, ...]:
        """In model order; none where the iteration was not looked at, or a number overflowed."""
        found, self._found = self._found, {}
        items = tuple(_rounded(found[number]) for number in sorted(found, reverse=True))
        finite = all(math.isfinite(item.norm) and math.isfinite(item.residual_norm or 0.0) for item in items)
        return items if finite else ()


def _rounded(item: CompressedItem) -> CompressedItem:
    """With what it keeps, and six digits: a log has many of them."""
    norm, lost, kept = item.norm, item.residual_norm, None
    if lost is not None:
        kept = float(f"{1 - (lost / norm) ** 2:.6g}") if norm else 1.0
        lost = float(f"{lost:.6g}")
    return replace(item, norm=float(f"{norm:.6g}"), residual_norm=lost, kept=kept)


def _norm(vector: Tensor) -> float:
    parts = [torch.linalg.vector_norm(vector[p], dtype=torch.float64) for p in pieces(vector.numel(), vector.device)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))


class CompressedReducer(FlatReducer):
    """`flat` is the sum. The gradients of each sender of this rank lie in a vector of its own, which becomes its next residual."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        operators: Sequence[Operator],
        comm: Comm,
        runs: Sequence[range],
        seed: int,
        *,
        each: bool = False,
        whole: int = 0,
        residual: Residual | None = None,
        kept: Kept | None = None,
    ) -> None:
        """`operators`: of each of the `parameters`, which are in model order. `runs[r]`: the senders of rank r; `each` says that they
        are logical workers. `whole`: the last so many parameters make one message, by the operator of the last. `kept` is for
        rank 0.
        """
        self.runs, self.own, self.each, self.whole = runs, runs[comm.rank], each, whole
        self.kinds = list(reversed(list(zip(parameters, operators, strict=True))))  # name and operator
        self.residual, self.seed, self.iter, self.kept = residual, seed, 0, kept or Kept()
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
        counts = super()._counts(ordered[self.whole :]) if self.whole < len(ordered) else []
        counts = [self.whole, *counts] if self.whole else counts
        start = index = 0
        for count in counts:
            members = ordered[index : index + count]
            lengths = [sum(p.numel() for p in members)] if index < self.whole else [p.numel() for p in members]
            items = []
            for n, length in enumerate(lengths, index):
                name, operator = self.kinds[n]
                items.append(Item("entire model" if n < self.whole else name, n, operator, start, start + length))
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
        self._take_up(logical_worker - self.own.start if self.each else 0, tail)
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
            draw = Draw(self.seed, self.iter, -1, item.number)
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


def slice_sum(
    comm: Comm, sent: Tensor, counts: Sequence[int], add: Callable[[Sequence[Tensor]], Tensor]
) -> Callable[[], Tensor]:
    """The sum of vectors, the rows of `sent` on all ranks, of which rank r has `counts[r]`: each rank gets its slice of every one, `add`s these up
    in their order, and hands the sum out, the same bits for any number of ranks. Each sends (W-1)/W of what it holds and as much of one
    vector: with one each what a ring all-reduce sends. The answer waits for the sum. Collective."""
    size, width = comm.size, sent.shape[1] // comm.size
    by_rank = sent.view(len(sent), size, width).transpose(0, 1).contiguous().view(-1)
    received = sent.new_empty(sum(counts) * width)
    wait = comm.exchange(by_rank, [len(sent) * width] * size, received, [count * width for count in counts])

    def finish() -> Tensor:
        wait()
        total = add(received.split(width))
        slices = [total if rank == comm.rank else torch.empty_like(total) for rank in range(size)]
        comm.complete(slices)()
        whole = total.new_empty(size * width)
        for place, piece in zip(whole.split(width), slices, strict=True):
            by_pieces(Tensor.copy_, place, piece)
        return whole

    return finish


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
