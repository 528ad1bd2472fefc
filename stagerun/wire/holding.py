"""Common parts of this wing's exchanges: bytes compared with dense gradients, vectors that differ between ranks and go into snapshots, and sums
by slices."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from stagerun.base.errors import ResumeRefused
from stagerun.base.recipe import Determinism, Solver
from stagerun.comm import Comm, Wait, dense_bytes
from stagerun.engine.codec import Digests, Packed, Tensors, decode, digest_on_device
from stagerun.engine.state import TrainState
from stagerun.engine.update import TAIL
from stagerun.train.agreement import hand_out, rank0
from stagerun.train.context import StageRun
from stagerun.train.exchange import Exchange
from stagerun.wire.operators import by_pieces
from stagerun.wire.rules import sending

NEEDED = "the residuals or replicas of all workers"


class Measured(Exchange):
    """An exchange whose bytes are compared with dense gradients."""

    def __init__(self, state: TrainState, solver: Solver, determinism: Determinism, comm: Comm) -> None:
        super().__init__(state, solver, determinism, comm)
        tensors, tail = [p.tensor for p in state.solver.parameters], state.statistics.n + TAIL
        elements, element_size = sum(t.numel() for t in tensors), tensors[0].element_size()
        self.dense_bytes = dense_bytes(determinism, elements, element_size, comm.size, solver.logical_workers, tail)

    def words(self, images: int) -> str:
        return sending(self.solver, images)


class Holding(Measured):
    """Ranks hold vectors, one per sender or replica. `owners`: for each vector, the rank whose copy counts. A snapshot has all vectors in `file`, with
    the tensors `common` to all ranks."""

    file: str
    field: str  # of the solver
    owners: Sequence[int] = ()
    packed: Packed | None = None

    def in_file(self) -> Tensors:
        """Return tensors with the names, shapes and types of the file; {} if a snapshot needs no file."""
        raise NotImplementedError

    def common(self) -> Tensors:
        """Return the live tensors, by their names in the file."""
        raise NotImplementedError

    def vector(self, number: int) -> Tensor:
        """Return the vector, or a buffer for another rank's."""
        raise NotImplementedError

    def parts(self, number: int, vector: Tensor, file: Tensors) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of a vector, and the file's tensor for it."""
        raise NotImplementedError

    def heard(self, number: int, vector: Tensor) -> None:
        """Hook of `gather`: a vector as its owner holds it."""

    def take(self, number: int, vector: Tensor) -> None:
        """Hook of `restore`: a vector from the snapshot."""

    @torch.no_grad()
    def gather(self, keep: bool) -> Mapping[str, memoryview]:
        like = self.in_file()
        if not like:
            self.packed = None
            return {}
        if keep and self.packed is None:
            self.packed = Packed(like, next(iter(like.values())).device.type == "cuda")
        tensors = self.packed.tensors if keep and self.packed is not None else {}
        for number, owner in enumerate(self.owners):
            vector = self.vector(number)
            self.comm.broadcast(vector, owner)
            self.heard(number, vector)
            for part, saved in self.parts(number, vector, tensors) if tensors else ():
                saved.copy_(part)
        for name, tensor in self.common().items() if tensors else ():
            tensors[name].copy_(tensor)
        return {self.file: self.packed.data} if self.packed is not None and tensors else {}

    def digests(self) -> Digests:
        return {name: digest_on_device(tensor) for name, tensor in self.common().items()}

    @torch.no_grad()
    def restore(self, run: StageRun, fitted: Callable[[Tensors], Tensors]) -> None:
        """Restore all from the snapshot. `fitted` converts the file's tensors to this stage's, ValueError if it can't. Collective; ResumeRefused for
        another network or other settings."""
        saved: Tensors = {}

        def read() -> None:
            assert run.files is not None and run.planned.start is not None
            try:
                if self.file not in run.files:
                    raise ValueError(f"it has no {self.file}")
                saved.update(fitted(decode(run.files[self.file])))
            except ValueError as error:
                text = f"snapshot {run.planned.start.name} does not fit the `{self.field}` of stage `{run.stage.name}`: {error}"
                hint = f"it was made with another `{self.field}`; take `--redo` for the stage, or another --out"
                raise ResumeRefused(text, hint) from error

        rank0(self.comm, read)
        for number in range(len(self.owners)):
            vector = self.vector(number)
            for part, tensor in self.parts(number, vector, saved) if saved else ():
                part.copy_(tensor)
            self.comm.broadcast(vector)
            self.take(number, vector)
        for name, tensor in self.common().items() if saved else ():
            tensor.copy_(saved[name])
        hand_out(self.comm, self.common().values())


def require_alike(saved: Tensors, like: Tensors) -> None:
    """ValueError naming the first tensor that isn't as in `like`, or not finite."""
    for name in sorted(like.keys() | saved.keys()):
        tensor, wanted = saved.get(name), like.get(name)
        if (
            (tensor is None or wanted is None)
            or (not tensor.is_floating_point() or tensor.shape != wanted.shape)
            or not bool(torch.isfinite(tensor).all())
        ):
            raise ValueError(f"`{name}` is missing, or doesn't fit this stage")


def slice_sum(
    comm: Comm,
    rows: Sequence[Sequence[Tensor]],
    counts: Sequence[int],
    out: Sequence[Tensor],
    add: Callable[[Sequence[Tensor]], Tensor],
    dtype: torch.dtype,
) -> Wait:
    """Sum rows over all ranks into `out`, sent as `dtype`. Rank r has `counts[r]` rows, each with a vector for each of
    `out`. Collective.

    Each rank gets its slice of every row, `add`s these in order, and sends the sum to all: the same bits for any number
    of ranks. Each sends (W-1)/W of its rows and as much of one vector: with a row each as much as a ring all-reduce.
    `rows` may be changed afterwards. The returned function waits for the sum."""
    lengths, size = list(map(len, out)), comm.size
    length, width = sum(lengths), -(-sum(lengths) // size)
    sent = out[0].new_zeros((len(rows), size * width), dtype=dtype)
    for whole, row in zip(sent, rows, strict=True):
        for place, part in zip(whole[:length].split(lengths), row, strict=True):
            by_pieces(Tensor.copy_, place, part)
    by_rank = sent.view(len(rows), size, width).transpose(0, 1).contiguous().view(-1)
    received = sent.new_empty(sum(counts) * width)
    wait = comm.exchange(by_rank, [len(rows) * width] * size, received, [count * width for count in counts])

    def finish() -> None:
        wait()
        whole = received.new_empty(size * width)
        slices = whole.split(width)
        by_pieces(Tensor.copy_, slices[comm.rank], add(received.split(width)))
        comm.complete(slices)()
        for target, piece in zip(out, whole[:length].split(lengths), strict=True):
            by_pieces(Tensor.copy_, target, piece)

    return finish


def flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order: a view [n]."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
