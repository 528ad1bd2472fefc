"""Compressed gradients (`compress_param`): every sender's message goes to every rank, and all ranks add them up in the same order.

A sender is a worker with `determinism: FIXED`, a logical worker with ELASTIC: so the sum has the same bits on every rank, and with
ELASTIC for any number of workers. c = gradient + residual is compressed, and what its message lacks is the next residual. That
replaces the old one only when the update is made (`accept`): an iteration that is broken off, or whose gradients are not finite,
keeps residuals.

A thread compresses and sends one chunk after the other during backward. Collectives start in the order of the chunks, whatever
the timing: that order must be the same on all ranks.
"""

import copy
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from stagerun.base.errors import PeerError
from stagerun.comm import Comm, Wait
from stagerun.comm.reduce import FlatReducer, Reducer, Switch, views_of
from stagerun.system.pulse import Pulse
from stagerun.wire.holding import Tensors, slice_sum
from stagerun.wire.messages import Item, Kept
from stagerun.wire.operators import Draw, Operator, Steps, by_pieces, from_bytes, joined

SAME = "run the same stagerun on all hosts, and the same command again: it resumes from the newest snapshot"


class Residual:
    """Vectors that each sender of this rank has not sent yet, with the last registered parameter first. `bases`: states of operators, which are the
    same on all ranks, by parameter; zeros before the first compressed update."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        runs: Sequence[range],
        rank: int,
        bases: Mapping[str, tuple[int, int]],
    ) -> None:
        """`parameters`: all that are trained, in model order; `runs[r]`: the senders of rank r, contiguous; `bases`: shapes."""
        self.runs, self.local, self.senders = runs, runs[rank], runs[-1].stop
        self.parameters = dict(reversed(list(parameters.items())))
        first = next(iter(parameters.values()))
        self.empty = torch.empty(sum(p.numel() for p in parameters.values()), dtype=first.dtype, device=first.device)
        self.vectors = [torch.zeros_like(self.empty) for _ in self.local]
        self.bases = {name: self.empty.new_zeros(shape) for name, shape in bases.items()}

    def by_name(self, vector: Tensor) -> Tensors:
        """Return the parts of a sender's vector by parameter."""
        return dict(zip(self.parameters, views_of(vector, list(self.parameters.values())), strict=True))

    def room(self, sender: int) -> Tensor:
        """Return the vector of a local sender, or a buffer for another's."""
        return self.vectors[sender - self.local.start] if sender in self.local else self.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Settings of messages. `seed`: of random numbers. `each`: senders are logical workers. `whole`: this number of last parameters makes one
    message, by the operator of the last."""

    seed: int
    each: bool = False
    whole: int = 0


class CompressedReducer(FlatReducer):
    """`flat` is the sum. Each sender of this rank has a vector of gradients, which becomes its next residual."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        operators: Sequence[Operator],
        comm: Comm,
        runs: Sequence[range],
        cut: Cut,
        residual: Residual | None,
        kept: Kept,
    ) -> None:
        """`operators`: one per parameter, in model order. `runs[r]`: the senders of rank r. `kept` is for rank 0."""
        self.runs, self.local, self.cut = runs, runs[comm.rank], cut
        self.kinds = list(reversed(list(zip(parameters, operators, strict=True))))  # name and operator
        self.residual, self.iter, self.kept = residual, 0, kept
        self.items: list[list[Item]] = []  # of each chunk
        super().__init__(list(parameters.values()), comm)
        self.sums = self.views  # parts of `flat`; `views` become parts of the present sender's vector
        self.vectors = [torch.zeros_like(self.flat) for _ in self.local]
        self.now = 0  # that sender
        self.tails: list[Tensor] = []
        self.total = torch.empty(0)
        self.jobs = Jobs()
        # The training thread reports waiting, in `finish`; this communicator is for the jobs' thread.
        self.quiet = copy.copy(comm)
        self.quiet.pulse = Pulse()
        self.left: list[Wait] = []
        self.bases = residual.bases if residual is not None else {}
        self.next_bases: Tensors = {}  # once this update is made

    def _counts(self, ordered: list[nn.Parameter]) -> list[int]:
        each, stop = [], 0
        for number, ((name, operator), p) in enumerate(zip(self.kinds, ordered, strict=True)):
            start, stop = stop, stop + p.numel()
            each.append(Item(name, number, operator, start, stop))
        together, left = self.cut.whole, iter(each[self.cut.whole :])
        counts = super()._counts(ordered[together:])
        self.items = [list(islice(left, count)) for count in counts]
        if together:
            self.items.insert(0, [Item("entire model", 0, each[0].operator, 0, each[together - 1].stop)])
            counts.insert(0, together)
        return counts

    def begin(self, iter: int = 0) -> None:
        super().begin(iter)
        self.quiet.spans = self.comm.spans  # a profile comes and goes
        self.iter, self.tails, self.left, self.next_bases = iter, [], [], {}
        self.kept.begin(iter)

    def add(self, loss: Tensor, logical_worker: int, tail: Tensor, last: bool) -> None:
        self._take_up(logical_worker - self.local.start if self.cut.each else 0, tail)
        if last:
            self._arm()
        loss.backward()

    def break_off(self, tail: Tensor) -> None:
        # As `add` of the last logical worker: tails first, then, in `finish`, all chunks in order, whatever they hold.
        self._take_up(len(self.local) - 1, tail)
        self._arm()

    def _take_up(self, sender: int, tail: Tensor) -> None:
        """Make `sender` of this rank the present one."""
        if not self.tails:
            self.tails, self.now = [torch.zeros_like(tail) for _ in self.local], -1
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

    # -- the jobs, in this order: tails, then each chunk; a chunk's answers are decoded after the next one is sent

    def _add_tails(self) -> None:
        messages = [tail.view(torch.uint8) for tail in self.tails]
        (received,) = self._share([messages], [messages[0].numel()])()
        self.total, *others = (from_bytes(message, torch.float64) for message in received)
        for other in others:
            self.total.add_(other)

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
        """Add up the answers for the previous chunk."""
        left, self.left = self.left, []
        for finish in left:
            finish()

    def _sum(self, items: Sequence[Item], dtype: torch.dtype) -> Wait:
        """Sum numbers that are only rounded: each rank adds a slice for all, in the order of the senders, and sends the sum to all. Traffic
        grows with the senders of a rank, and not with the number of ranks."""
        rows = [[item.of(vector) for item in items] for vector in self.vectors]
        for item, c in zip(items, rows[0], strict=True) if self.kept.due else ():
            self.kept.sent(item, c, c.numel() * dtype.itemsize)
            self.kept.left(item, c - c.to(dtype).to(c.dtype))

        def total(slices: Sequence[Tensor]) -> Tensor:
            result = torch.zeros_like(slices[0], dtype=self.flat.dtype)
            for one in slices:
                by_pieces(Tensor.add_, result, one)
            return result

        out, counts = [item.of(self.flat) for item in items], [len(run) for run in self.runs]
        wait = slice_sum(self.quiet, rows, counts, out, total, dtype)
        for row in rows if self.residual is not None else ():
            for c in row:
                by_pieces(Tensor.zero_, c)
        return wait

    def _gather(self, items: Sequence[Item]) -> Wait:
        """Send every sender's message of each item to every rank."""
        running, messages = [], []
        for item in items:
            vectors = [item.of(vector) for vector in self.vectors]
            draw = Draw(self.cut.seed, self.iter, -1, item.number)
            basis = self.bases.get(item.name)
            state = basis if basis is not None and bool(basis.any()) else None  # drawn for the first update
            steps = item.operator.steps(vectors, self.local, draw, item.of(self.flat).zero_(), state)
            running.append((item, steps))
            messages.append(next(steps))
            if self.kept.due:
                self.kept.encoded(item, vectors[0], messages[-1][0], draw)
        return self._round(0, running, messages)

    def _round(self, number: int, running: Sequence[tuple[Item, Steps]], messages: list[list[Tensor]]) -> Wait:
        """Start to send the messages of a round; the returned function waits for it and the rounds after it."""
        element_size = self.flat.element_size()
        sizes = [item.operator.sizes(item.stop - item.start, element_size)[number] for item, _ in running]
        arrived = self._share(messages, sizes)

        def finish() -> None:
            answers = zip(running, arrived(), strict=True)
            more = [(one, sent) for one, got in answers if (sent := self._following(*one, got)) is not None]
            if more:
                left, following = zip(*more, strict=True)
                self._round(number + 1, left, list(following))()

        return finish

    def _following(self, item: Item, steps: Steps, received: list[Tensor]) -> list[Tensor] | None:
        """Return the messages of the next round; None after the last."""
        vectors = [item.of(vector) for vector in self.vectors]
        try:
            messages = steps.send(received)
        except StopIteration as end:
            if end.value is not None:
                self.next_bases[item.name] = end.value
            if self.kept.due and item.operator.residual:
                self.kept.left(item, vectors[0])
            if self.residual is not None and not item.operator.residual:
                for vector in vectors:
                    vector.zero_()
            return None
        except (ValueError, IndexError) as error:
            text = f"another worker sent what is not a compressed gradient of `{item.name}`: {error}"
            raise PeerError(text, SAME) from error
        if self.kept.due:
            self.kept.sent(item, vectors[0], messages[0].numel())
        return messages

    # -- messages, from every sender to every rank; a rank has any number of senders

    def _share(self, messages: list[list[Tensor]], sizes: Sequence[int | None]) -> Callable[[], list[list[Tensor]]]:
        """Start sending the messages, by item and local sender. The returned function waits for everyone's, by item and sender. `sizes`: the bytes
        of each item's message, None if only the sender can tell."""
        count = len(sizes)
        local = [message for row in zip(*messages, strict=True) for message in row]
        lengths = self._lengths(local, sizes)
        whole = torch.empty(sum(lengths), dtype=torch.uint8, device=self.flat.device)
        buffers = whole.split([sum(lengths[run.start * count : run.stop * count]) for run in self.runs])
        if local:
            by_pieces(Tensor.copy_, buffers[self.comm.rank], joined(local))
        wait = self.quiet.complete(buffers)

        def arrived() -> list[list[Tensor]]:
            wait()
            parts = whole.split(lengths)
            return [list(parts[item::count]) for item in range(count)]

        return arrived

    def _lengths(self, local: Sequence[Tensor], sizes: Sequence[int | None]) -> list[int]:
        """Return lengths by sender and item, sent only where `sizes` has None. `local`: this rank's messages."""
        senders = self.runs[-1].stop
        if None not in sizes:
            return [*sizes] * senders  # type: ignore[list-item]
        lengths = torch.empty(senders * len(sizes), dtype=torch.int64, device=self.flat.device)
        tables = lengths.split([len(run) * len(sizes) for run in self.runs])
        tables[self.comm.rank].copy_(torch.tensor([len(message) for message in local]))
        self.quiet.complete(tables)()
        for rank, table in enumerate(tables):
            if ((table < 0) | (table > self.flat.nbytes)).any():
                text = f"another worker, rank {rank}, announces a compressed gradient of an impossible length"
                raise PeerError(text, SAME)
        return lengths.tolist()


class From(Switch):
    """`before` for the first iterations of a stage, `after` from `start` on."""

    def __init__(self, start: int, before: Reducer, after: Reducer) -> None:
        super().__init__(before)
        self.start, self.after = start, after

    def begin(self, iter: int = 0) -> None:
        if iter >= self.start:
            self.now = self.after  # frees the buffers of `before`
        super().begin(iter)


class Jobs:
    """A queue of jobs for a thread, which ends with this object; the process doesn't wait for it: a peer may never answer."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Wait | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=_work, args=(self._jobs,), name="compress", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, job: Wait) -> None:
        def careful() -> None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # raised by `wait`, in the thread that trains
                    self._error = error

        self._jobs.put(careful)

    def wait(self) -> None:
        """Wait for all jobs, or raise the first error; later jobs are skipped."""
        done = threading.Event()
        self._jobs.put(done.set)
        done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error


@torch.no_grad()
def _work(jobs: "queue.SimpleQueue[Wait | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to the reducer, whose end ends this thread
