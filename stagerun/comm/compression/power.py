"""PowerSGD: a matrix as the product of two narrow ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stagerun.comm.compression.operator import PIECE, Draw, Operator, Steps, expect, from_bytes, to_bytes


@dataclass(frozen=True, slots=True)
class PowerSgd(Operator):
    """D = P (sum Q_i)^T, where M_i is sender i's matrix [out, rest], Q [rest, rank] that of the update before, P = orthonormal(sum M_i Q) and
    Q_i = M_i^T P (Vogels et al., arXiv:1905.13727, algorithm 1). Two rounds: M_i Q, then Q_i. The state is sum Q_i, which the next update
    starts from; at first it is drawn.

    Sender i's residual is M_i - P Q_i^T, by its own Q_i: residuals add up to sum M_i - D, as algorithm 2's do, whose e_i is M_i less what
    its own message decodes to. (The paper's code subtracts the mean over all senders from each.)

    No BLAS: its last bits depend on threads, and on the place in memory; ranks must have the same ones.
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
        # Drawn on the CPU, and evenly: what is drawn otherwise depends on the processor's model.
        count = self.shape[1] * self.rank
        numbers = draw.of(-1).uniform(torch.device("cpu"))(count).mul_(2).sub_(1)
        return numbers.view(self.shape[1], self.rank).to(out)


def saves(rank: int, shape: tuple[int, int]) -> bool:
    return rank <= min(shape) and rank * sum(shape) < shape[0] * shape[1]


def _total(messages: Sequence[Tensor], rows: int, rank: int, like: Tensor) -> Tensor:
    total = like.new_zeros(rows * rank)
    for message in messages:
        expect(message, total.numel() * like.element_size())
        total += from_bytes(message, like.dtype)
    return total.view(rows, rank)


def _tiles(shape: torch.Size, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """The matrix in parts, of whole rows where they are short enough; see PIECE."""
    rows, columns = shape
    wide = min(columns, PIECE) if device.type == "cpu" else columns
    high = max(1, PIECE // wide) if device.type == "cpu" else rows
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            yield slice(row, min(row + high, rows)), slice(column, min(column + wide, columns))


def _times(matrix: Tensor, q: Tensor) -> Tensor:
    top = q.abs().amax(0)
    # The length of a column is of no matter. Products of what is tiny on both sides would vanish.
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
    """Its columns made orthonormal by Gram-Schmidt, twice, in float64 on the CPU: the same bits on every machine. A column that depends
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
