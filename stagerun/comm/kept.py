"""What messages keep of the gradients that they are made from, looked at from beside: no bit depends on it."""

import math
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from stagerun.base.events import CompressedItem
from stagerun.comm.compression.operator import Draw, Operator, pieces


class Kept:
    """What sender 0 keeps, in every `every`-th iteration; 0: in none. A reducer calls all but `take`."""

    def __init__(self, every: int = 0) -> None:
        self.every, self.due = every, False
        self._found: dict[int, _Item] = {}  # by the number of the item

    def begin(self, iter: int) -> None:
        """`iter`: updates done in the stage."""
        self._found, self.due = {}, self.every > 0 and (iter + 1) % self.every == 0

    def rounded(self, number: int, name: str, c: Tensor, dtype: torch.dtype) -> None:
        """A message of the numbers of `c`, each rounded to `dtype`."""
        self._found[number] = _Item(name, _norm(c), _norm(c - c.to(dtype).to(c.dtype)), c.numel() * dtype.itemsize)

    def encoded(self, number: int, name: str, c: Tensor, operator: Operator, message: Tensor, draw: Draw) -> None:
        """The message of the first round of sender 0. What it lacks is the residual (`left`); without one it is found by decoding the message
        by itself, which of a method with more rounds says nothing."""
        lacks = None
        if not operator.residual and len(operator.sizes(c.numel(), c.element_size())) == 1:
            out, alone = torch.zeros_like(c), c.clone()
            steps = operator.steps([alone], [0], draw, out)
            next(steps)
            with suppress(StopIteration):
                steps.send([message])
            lacks = _norm(c - out)
        self._found[number] = _Item(name, _norm(c), lacks, message.numel())

    def one_more(self, number: int, message: Tensor) -> None:
        """The message of a later round."""
        self._found[number].bytes += message.numel()

    def left(self, number: int, residual: Tensor) -> None:
        """After the last round, where there is a residual."""
        self._found[number].lacks = _norm(residual)

    def take(self) -> tuple[CompressedItem, ...]:
        """In model order; none where the iteration was not looked at, or a number overflowed."""
        found, self._found = self._found, {}
        items = tuple(found[number].value() for number in sorted(found, reverse=True))
        finite = all(math.isfinite(item.norm) and math.isfinite(item.residual_norm or 0.0) for item in items)
        return items if finite else ()


@dataclass(slots=True)
class _Item:
    name: str
    norm: float
    lacks: float | None
    bytes: int

    def value(self) -> CompressedItem:
        kept = None if self.lacks is None else _short(1 - (self.lacks / self.norm) ** 2) if self.norm else 1.0
        lacks = None if self.lacks is None else _short(self.lacks)
        return CompressedItem(name=self.name, norm=_short(self.norm), residual_norm=lacks, kept=kept, bytes=self.bytes)


def _short(value: float) -> float:
    """With six digits: a log has many of them."""
    return float(f"{value:.6g}")


def _norm(vector: Tensor) -> float:
    parts = [torch.linalg.vector_norm(vector[p], dtype=torch.float64) for p in pieces(vector.numel(), vector.device)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))
