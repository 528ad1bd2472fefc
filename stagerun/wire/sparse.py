"""Methods that send fewer numbers: some of them, or two narrow matrices instead of a wide one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from stagerun.wire.operators import (
    PIECE,
    Draw,
    OneRound,
    Operator,
    Steps,
    expect,
    from_bytes,
    joined,
    largest_of,
    nonzero,
    pack,
    picked,
    pieces,
    put,
    to_bytes,
    unpack,
    zero_bytes,
)


class Sparse(OneRound):
    """A message is the values kept, in order, and where they were: as k numbers of as many bytes as n needs, or as n bits, whichever is
    shorter. Where that isn't below n numbers, all n go, with 0 for the others. The length, which grows with k, tells which."""

    def select(self, vector: Tensor, draw: Draw) -> Tensor:
        """Return the indices to keep: int64 [k], growing."""
        raise NotImplementedError

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        n, index = vector.numel(), self.select(vector, draw)
        values, k, bits = picked(vector, index), len(index), _bits(n)
        if length(n, k, vector.element_size()) == vector.nbytes:
            whole = zero_bytes(vector, vector.nbytes)
            put(from_bytes(whole, vector.dtype), index, values)
            return whole
        if _width(n) * k <= bits:
            where = to_bytes(index.int()).view(-1, 4)[:, : _width(n)].reshape(-1)
        else:
            mask = zero_bytes(vector, 8 * bits)
            put(mask, index, 1)
            where = pack(mask, 1)
        return joined((to_bytes(values), where))

    def decode(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        n, width, size = out.numel(), out.element_size(), message.numel()
        bits = _bits(n)
        k, rest = divmod(size, _width(n) + width)
        if rest == 0 and _width(n) * k <= bits:
            whole = message.new_zeros((k, 4))
            whole[:, : _width(n)] = message[width * k :].view(-1, _width(n))
            index = whole.view(torch.int32).view(-1).long()
        else:
            k = (size - bits) // width
            index = nonzero(unpack(message[width * k :], 1, 8 * bits)) if k >= 0 else torch.empty(0)
        if size != length(n, k, width) or len(index) != k:
            raise ValueError(f"a sender's message of {size} bytes is not one of {n} elements")
        if not ((index >= 0) & (index < n)).all():
            raise ValueError(f"a sender's message has indices beyond {n} elements")
        values = from_bytes(message[: width * k], out.dtype)
        put(out, index, picked(out, index).add_(values))
        if vector is not None:
            put(vector, index, picked(vector, index).sub_(values))


def _width(n: int) -> int:
    """Return the bytes of an index: a message with 1 % of a million values is a sixth shorter than with 4."""
    return max(1, ((n - 1).bit_length() + 7) // 8)


def _bits(n: int) -> int:
    return (n + 7) // 8


def length(n: int, k: int, element_size: int) -> int:
    """Return the bytes of a message with k of n values."""
    return min(min(_width(n) * k, _bits(n)) + k * element_size, n * element_size)


def kept(n: int, ratio: float) -> int:
    """Return max(1, floor(n ratio)), of the ratio as it is written.

    >>> kept(100, 0.29), math.floor(100 * 0.29)
    (29, 28)
    """
    return max(1, math.floor(n * Fraction(repr(ratio))))


@dataclass(frozen=True, slots=True)
class TopK(Sparse):
    """d = c where |c| is among the k largest, else 0; k = max(1, floor(n ratio)). Of equal ones the first are kept. NaN counts as the
    largest."""

    residual: bool
    ratio: float

    def sizes(self, n: int, element_size: int) -> tuple[int]:
        return (length(n, kept(n, self.ratio), element_size),)

    def select(self, vector: Tensor, draw: Draw) -> Tensor:
        return largest(vector, kept(vector.numel(), self.ratio))


@dataclass(frozen=True, slots=True)
class Threshold(Sparse):
    """d = c where |c| >= threshold, else 0. NaN is kept."""

    residual: bool
    threshold: float

    def select(self, vector: Tensor, draw: Draw) -> Tensor:
        indices = []
        for p in pieces(vector):
            sizes = vector[p].abs()
            indices.append(nonzero(~(sizes < self.threshold) & (sizes != 0)) + p.start)  # a 0 needn't be sent
        return joined(indices)


@dataclass(frozen=True, slots=True)
class RandomK(Operator):
    """d = c at k = max(1, floor(n ratio)) random indices, the same for all senders, else 0: only values are sent. Without a memory d is
    multiplied by n/k, so that it is c on average (Stich et al., arXiv:1809.07599)."""

    residual: bool
    ratio: float

    def sizes(self, n: int, element_size: int) -> tuple[int]:
        return (kept(n, self.ratio) * element_size,)

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        n = out.numel()
        k = kept(n, self.ratio)
        # Drawn on the CPU: GPUs of different models draw different numbers.
        index = largest(draw.uniform(torch.device("cpu"))(n), k).to(out.device)
        scale = 1.0 if self.residual else n / k
        # Numbers that aren't finite must be noticed elsewhere, too.
        scales = [scale if torch.isfinite(largest_of(v)) else torch.nan for v in vectors]
        messages = yield [to_bytes(picked(v, index) * one) for v, one in zip(vectors, scales, strict=True)]
        total = picked(out, index)
        for message in messages:
            expect(message, k * out.element_size())
            total += from_bytes(message, out.dtype)
        put(out, index, total)
        for vector in vectors:
            put(vector, index, 0)
        return None


def largest(vector: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest |v|, growing; the first of equal ones."""
    return _largest_numpy(vector, k) if vector.device.type == "cpu" else _largest_torch(vector, k)


def _keys(vector: Tensor) -> Tensor:
    """Return integers in the order of |v|: the bits without the sign. NaN is above infinity."""
    whole = torch.int32 if vector.dtype == torch.float32 else torch.int64
    return vector.view(whole) & torch.iinfo(whole).max


def _largest_torch(vector: Tensor, k: int) -> Tensor:
    keys = _keys(vector)
    least = torch.topk(keys, k).values[-1]
    above = torch.nonzero(keys > least).view(-1)
    equal = torch.nonzero(keys == least).view(-1)[: k - len(above)]
    return torch.cat((above, equal)).sort().values


_SAMPLE = 1 << 15


def _largest_numpy(vector: Tensor, k: int) -> Tensor:
    """Partition, of a long vector, only the elements above a bound, which a sample sets so that little more than k pass."""
    n = vector.numel()
    bound = 0
    if n > 4 * _SAMPLE:
        keys = _keys(vector[:: n // _SAMPLE | 1]).numpy()
        share = k / n * len(keys)
        rank = int(share + 4 * math.sqrt(share) + 8)  # 4 standard deviations: hardly ever too few
        bound = _ranked(keys, rank) if rank < len(keys) else 0
    indices, passed = _not_below(vector, bound)
    if len(indices) < k:
        indices, passed = _not_below(vector, 0)
    least = _ranked(passed, k)
    keep = passed >= least
    equal = np.flatnonzero(passed == least)
    keep[equal[k - np.count_nonzero(passed > least) :]] = False
    return torch.from_numpy(indices[keep])


def _ranked(keys: np.ndarray, k: int) -> int:
    """Return the k-th largest."""
    return int(np.partition(keys, len(keys) - k)[len(keys) - k])


def _not_below(vector: Tensor, bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of keys of at least `bound`, and these keys."""
    indices, passed = [], []
    for p in pieces(vector):
        keys = _keys(vector[p]).numpy()
        above = np.flatnonzero(keys >= bound)
        passed.append(keys[above])
        indices.append(above + p.start)
    return np.concatenate(indices), np.concatenate(passed)


# -- PowerSGD


@dataclass(frozen=True, slots=True)
class PowerSgd(Operator):
    """D = P (sum Q_i)^T, where M_i is sender i's matrix [out, rest], Q [rest, rank] the previous update's, P = orthonormal(sum M_i Q) and
    Q_i = M_i^T P (Vogels et al., arXiv:1905.13727, algorithm 1). Two rounds: M_i Q, then Q_i. The state is sum Q_i, which the next update
    starts from; at first it is drawn.

    Sender i's residual is M_i - P Q_i^T, by its Q_i: residuals add up to sum M_i - D, as algorithm 2's do, whose e_i is M_i less its
    decoded message. (The paper's code subtracts the mean over all senders from each.)

    No BLAS: its last bits depend on threads and alignment, and must be the same on all ranks.
    """

    residual: bool
    rank: int
    shape: tuple[int, int]

    def basis(self) -> tuple[int, int]:
        return (self.shape[1], self.rank)

    def sizes(self, n: int, element_size: int) -> tuple[int, ...]:
        return (self.shape[0] * self.rank * element_size, self.shape[1] * self.rank * element_size)

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        matrices = [v.view(self.shape) for v in vectors]
        q = self._first(draw, out) if state is None else state
        p = orthonormal(_total((yield [to_bytes(_times(m, q)) for m in matrices]), self.shape[0], self.rank, out))
        parts = [_transposed_times(m, p) for m in matrices]
        total = _total((yield [to_bytes(part) for part in parts]), self.shape[1], self.rank, out)
        _add_product(p, total, out.view(self.shape))
        if self.residual:
            for matrix, part in zip(matrices, parts, strict=True):
                _add_product(p, -part, matrix)
        # A column without a gradient says nothing about the next one; from 0 it would never move again.
        return torch.where((total == 0).all(0), q, total)

    def _first(self, draw: Draw, out: Tensor) -> Tensor:
        # Drawn on the CPU, and evenly: other draws depend on the processor's model.
        numbers = draw.uniform(torch.device("cpu"))(math.prod(self.basis())).mul_(2).sub_(1)
        return numbers.view(self.basis()).to(out)


def saves(rank: int, shape: tuple[int, int]) -> bool:
    return rank <= min(shape) and rank * sum(shape) < shape[0] * shape[1]


def _total(messages: Sequence[Tensor], rows: int, rank: int, like: Tensor) -> Tensor:
    total = like.new_zeros(rows * rank)
    for message in messages:
        expect(message, total.numel() * like.element_size())
        total += from_bytes(message, like.dtype)
    return total.view(rows, rank)


def _tiles(shape: torch.Size, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Yield parts of the matrix, of whole rows if these are short enough; see PIECE."""
    rows, columns = shape
    most = PIECE if device.type == "cpu" else shape.numel()
    wide = min(columns, most)
    high = max(1, most // wide)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def _times(matrix: Tensor, q: Tensor) -> Tensor:
    top = q.abs().amax(0)
    # A column's length doesn't matter. Products of two tiny numbers would vanish.
    columns = (q / torch.where(top == 0, 1, top)).T.contiguous()
    result = matrix.new_zeros(len(matrix), q.shape[1])
    for row, column in _tiles(matrix.shape, matrix.device):
        for j, of_q in enumerate(columns):
            result[row, j] += (matrix[row, column] * of_q[column]).sum(1)
    return result


def _transposed_times(matrix: Tensor, p: Tensor) -> Tensor:
    result = matrix.new_zeros(p.shape[1], matrix.shape[1])
    for row, column in _tiles(matrix.shape, matrix.device):
        for j in range(p.shape[1]):
            result[j, column] += (matrix[row, column] * p[row, j : j + 1]).sum(0)
    return result.T.contiguous()


def _add_product(p: Tensor, q: Tensor, out: Tensor) -> None:
    """`out` += P Q^T. Products are added one after the other: a fused multiply-add may round differently where a vector register ends."""
    columns = q.T.contiguous()
    for row, column in _tiles(out.shape, out.device):
        value = p[row, :1] * columns[0, column]
        for j in range(1, len(columns)):
            value += p[row, j : j + 1] * columns[j, column]
        out[row, column] += value


def orthonormal(matrix: Tensor) -> Tensor:
    """Make columns orthonormal by Gram-Schmidt, twice, in float64 on the CPU: the same bits on every machine. A column that depends
    on those before it becomes 0. All is NaN where anything isn't finite."""
    columns = matrix.T.double().cpu().numpy().copy()
    if not np.isfinite(columns).all():
        return torch.full_like(matrix, torch.nan)
    for j, column in enumerate(columns):
        column /= np.abs(column).max() or 1.0
        before = _norm(column)
        for _ in range(2):
            for earlier in columns[:j]:
                column -= (column * earlier).sum() * earlier
        after = _norm(column)
        column *= 1 / after if after > 1e-6 * before else 0.0
    return torch.from_numpy(columns).T.to(matrix).contiguous()


def _norm(column: np.ndarray) -> float:
    return float(np.sqrt(np.square(column).sum()))
