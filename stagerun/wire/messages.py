"""Operators by the rules of `compress_param`; QSGD and TernGrad, which round; and how much of the gradients messages keep."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagerun.base.events import CompressedItem
from stagerun.base.recipe import Compression, CompressionRule, Memory, Method, Scope
from stagerun.engine.parameters import first_that_fits, kind_of
from stagerun.engine.state import TrainState
from stagerun.wire.operators import (
    BFloat16,
    Dense,
    Draw,
    Fixed,
    OneRound,
    Operator,
    Piece,
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
from stagerun.wire.rules import METHODS, SETTINGS, settings_of
from stagerun.wire.sparse import PowerSgd, RandomK, Threshold, TopK, saves

BUCKET = 512


@dataclass(frozen=True, slots=True)
class Qsgd(OneRound):
    """d = N sign(c) l / s with l = floor(|c|/N s) or one more, with the probability of what floor has cut off, so d is c on average
    (Alistarh et al., arXiv:1610.02132). N is the Euclidean norm of each 512 numbers, s is `qstates`.
    Where N isn't finite, d is NaN and the run notices.

    A message: the norms; a byte per 512 codes, the bits that the largest of them has; the codes of +-l (0, -1, 1, -2, ... are 0, 1, 2, 3, ...)
    packed, those of the fewest bits first. A code above 8 bits has its upper ones apart: packed likewise or, up to 255 states, where the
    only upper bit is rare, as uint32 places of those that have it.
    """

    residual: bool
    qstates: int

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        n, device = vector.numel(), vector.device
        rows = -(-n // BUCKET)
        uniform = draw.uniform(device)
        low, high = zero_bytes(vector, rows, BUCKET), zero_bytes(vector, rows, BUCKET)
        norms, widths = vector.new_empty(rows), zero_bytes(vector, rows)
        for p in pieces(vector):
            row = _rows(p)
            missing = -vector[p].numel() % BUCKET
            block = (torch.nn.functional.pad(vector[p], (0, missing)) if missing else vector[p]).view(-1, BUCKET)
            norms[row] = norm = _row_norms(block)
            codes = self._codes(block, norm, uniform(block.numel()).view(-1, BUCKET))
            low[row], high[row] = codes, codes >> 8
            widths[row] = torch.frexp(codes.amax(1).float()).exponent.to(torch.uint8)
        parts = [to_bytes(norms), widths, *_packed(low, widths.clamp(max=8), n)]
        if self.qstates > 255:
            parts += _packed(high, widths.clamp(min=8) - 8, n)
        elif (widths > 8).any():
            parts.append(to_bytes(nonzero(high.view(-1)).int()))
        message = joined(parts)
        if message.numel() < vector.nbytes:
            return message
        whole = torch.zeros_like(vector)
        self.decode(message, whole, None)
        return to_bytes(whole)

    def _codes(self, block: Tensor, norm: Tensor, uniform: Tensor) -> Tensor:
        """int32 [rows, 512]"""
        level = block.abs().div_(torch.where(norm == 0, 1, norm).view(-1, 1)).mul_(self.qstates)
        level.add_(uniform).clamp_(max=self.qstates)
        if not torch.isfinite(norm).all():
            level.nan_to_num_(0.0)
        whole = level.copysign_(block).int()  # cut off towards 0
        return (whole >> 31).bitwise_xor_(whole.add_(whole))

    def decoded(self, message: Tensor, like: Tensor) -> Iterator[Piece]:
        n = like.numel()
        rows = -(-n // BUCKET)
        at = rows * like.element_size()
        expect(message[: at + rows], at + rows)
        norms, widths = from_bytes(message[:at], like.dtype), message[at : at + rows]
        low, at = _unpacked(message, at + rows, widths.clamp(max=8), n)
        high = None
        if self.qstates > 255:
            high, at = _unpacked(message, at, widths.clamp(min=8) - 8, n)
            expect(message, at)
        elif at < message.numel():
            expect(message, at + (message.numel() - at) // 4 * 4)
            high = zero_bytes(low, rows, BUCKET)
            put(high.view(-1), from_bytes(message[at:], torch.int32).long(), 1)
        for p in pieces(like):
            row = _rows(p)
            codes = low[row].int()
            if high is not None:
                codes += high[row].int() << 8
            value = ((codes >> 1) ^ -(codes & 1)).to(like.dtype).div_(self.qstates)
            value.mul_(norms[row].view(-1, 1))
            yield p, value.view(-1)[: p.stop - p.start]


def _rows(p: slice) -> slice:
    """Return the rows of 512 numbers in a piece."""
    return slice(p.start // BUCKET, -(-p.stop // BUCKET))


def _row_norms(block: Tensor) -> Tensor:
    """[rows]. Numbers of float64 are divided by the largest beforehand, so that the squares of tiny and huge ones neither vanish nor
    overflow."""
    if block.dtype == torch.float32:
        return torch.linalg.vector_norm(block, dim=1, dtype=torch.float64).float()
    top = block.abs().amax(1)
    shares = block / torch.where(top == 0, 1, top).view(-1, 1)
    return top * shares.square_().sum(1).sqrt_()


def _lengths(widths: Tensor, n: int) -> list[tuple[int, Tensor, int]]:
    """Return (width, its rows, bytes) of each width above 0. The last row of all sends only the codes of numbers, in whole eights."""
    last, missing = len(widths) - 1, (-n % BUCKET) // 8
    lengths = []
    for width in np.unique(widths.cpu().numpy()).tolist():
        if width:
            rows = nonzero(widths == width)
            cut = missing if int(rows[-1]) == last else 0
            lengths.append((width, rows, (len(rows) * (BUCKET // 8) - cut) * width))
    return lengths


def _packed(codes: Tensor, widths: Tensor, n: int) -> list[Tensor]:
    return [pack(picked(codes, rows).view(-1), width)[:size] for width, rows, size in _lengths(widths, n)]


def _unpacked(message: Tensor, at: int, widths: Tensor, n: int) -> tuple[Tensor, int]:
    """Return codes [rows, 512] and where in the message the next part begins."""
    codes = zero_bytes(message, len(widths), BUCKET)
    for width, rows, size in _lengths(widths, n):
        part, count = message[at : at + size], len(rows) * BUCKET
        expect(part, size)
        whole = joined((part, zero_bytes(part, count // 8 * width - size)))
        put(codes, rows, unpack(whole, width, count).view(-1, BUCKET))
        at += size
    return codes, at


WIDTH = 2


@dataclass(frozen=True, slots=True)
class TernGrad(Fixed):
    """d = s sign(c) b with b = 1 with the probability min(|c|, s)/s, else 0; s = min(max |c|, 2.5 sigma), sigma the root of the mean c^2
    (Wen et al., arXiv:1705.07878). A message is the scale and two bits for each number."""

    residual: bool

    def coded(self, n: int, element_size: int) -> int:
        return element_size + (n * WIDTH + 7) // 8

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        scale, uniform = _scale(vector), draw.uniform(vector.device)
        parts = [to_bytes(scale)]
        for p in pieces(vector):
            count = p.stop - p.start
            share, chance = vector[p] / torch.where(scale == 0, 1, scale), uniform(count)
            codes = zero_bytes(vector, count + -count % 8)
            codes[:count] = (share > chance).to(torch.uint8).add_(-share > chance, alpha=2)
            parts.append(pack(codes, WIDTH)[: (count * WIDTH + 7) // 8])
        return joined(parts)

    def decoded(self, message: Tensor, like: Tensor) -> Iterator[Piece]:
        start = like.element_size()
        scale = from_bytes(message[:start], like.dtype)
        values = torch.cat((0 * scale, scale, -scale, 0 * scale))  # 0 of what isn't finite is NaN
        per, table = 8 // WIDTH, values[_codes_of_bytes(like.device)]
        for p in pieces(like):
            part = message[start + p.start // per : start + -(-p.stop // per)]
            yield p, table.index_select(0, part.int()).view(-1)[: p.stop - p.start]


def _scale(vector: Tensor) -> Tensor:
    """[1]"""
    top = largest_of(vector)
    divisor = torch.where(top == 0, 1, top)
    total = torch.zeros(1, dtype=torch.float64, device=vector.device)
    for p in pieces(vector):
        total += torch.linalg.vector_norm(vector[p] / divisor, dtype=torch.float64).square_()
    sigma = (total / vector.numel()).sqrt_()  # in units of the largest
    return (top * torch.clamp(2.5 * sigma, max=1.0)).to(vector.dtype)


@cache
def _codes_of_bytes(device: torch.device) -> Tensor:
    """Return the codes in each possible byte: [256, 4]. A byte is decoded at once."""
    shifts = torch.arange(0, 8, WIDTH, device=device)
    return (torch.arange(256, device=device)[:, None] >> shifts) & (2**WIDTH - 1)


# -- the method of each parameter


def rules_of(state: TrainState, how: Compression) -> dict[str, Compression]:
    """Return how each trained parameter's gradient is compressed, by the first rule that fits, else as all are: in model order; with scope
    ENTIRE_MODEL its exceptions come first."""
    rules = {}
    for parameter in state.solver.parameters:
        rule = first_that_fits(how.param, parameter.name, kind_of(state.model, parameter.name))
        changes = {field: getattr(rule, field) for field in ("method", "memory", *SETTINGS)} if rule is not None else {}
        rules[parameter.name] = replace(how, **changes)
    if how.scope is Scope.ENTIRE_MODEL:
        return dict(sorted(rules.items(), key=lambda pair: pair[1] == how))
    return rules


# A class for each method, whose docstring is its formula; built with `residual` and the settings that it reads. Its traits without torch are in
# `wire.rules`.
BUILT: Mapping[Method, Callable[..., Operator]] = {
    Method.NONE: Dense,
    Method.TOP_K: TopK,
    Method.RANDOM_K: RandomK,
    Method.THRESHOLD: Threshold,
    Method.TERNGRAD: TernGrad,
    Method.QSGD: Qsgd,
    Method.POWER_SGD: PowerSgd,
    Method.BF16: BFloat16,
}


def operator(how: Compression | CompressionRule, shape: Sequence[int], senders: int = 1) -> Operator:
    """Return the operator of a tensor of that shape. Gradients are divided by the number of senders already, as losses are; so is a threshold.
    KeyError for AUTO, which has no operator."""
    settings: dict[str, Any] = settings_of(how.method, how)
    residual = how.memory is Memory.RESIDUAL
    if how.method is Method.THRESHOLD:
        settings["threshold"] /= senders
    if how.method is Method.POWER_SGD:
        settings["shape"] = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if not saves(settings["rank"], settings["shape"]):
            return Dense(residual)
    return BUILT[how.method](residual=residual, **settings)


def remembers(rule: Compression) -> bool:
    return rule.method is Method.POWER_SGD or (rule.memory is Memory.RESIDUAL and not METHODS[rule.method].exact)


@dataclass(frozen=True, slots=True)
class Item:
    """A parameter, or all of them: the content of one message. `start` and `stop` cut it out of a vector."""

    name: str
    number: int  # the key of its random numbers
    operator: Operator
    start: int
    stop: int

    def of(self, vector: Tensor) -> Tensor:
        return vector[self.start : self.stop]


class Kept:
    """Measures how much of its gradients sender 0's messages keep, at every `every`-th iteration; 0: never. No bit depends on it. The reducer calls
    all but `take`."""

    def __init__(self, every: int = 0) -> None:
        self.every, self.due = every, False
        self._items: dict[int, CompressedItem] = {}  # by the number of the item

    def begin(self, iter: int) -> None:
        """`iter`: updates done in the stage."""
        self._items, self.due = {}, self.every > 0 and (iter + 1) % self.every == 0

    def sent(self, item: Item, c: Tensor, size: int) -> None:
        """Record a message of so many bytes; `c` counts at the first round's."""
        before = self._items.get(item.number)
        norm, bytes = (before.norm, before.bytes) if before is not None else (_norm(c), 0)
        self._items[item.number] = CompressedItem(
            name=item.name, norm=norm, residual_norm=None, kept=None, bytes=bytes + size
        )

    def encoded(self, item: Item, c: Tensor, message: Tensor, draw: Draw) -> None:
        """Record the message of the first round. Its loss is the residual after the last round (`left`); without a
        residual decode the message, which works for methods of one round."""
        operator, copy = item.operator, c.clone()
        self.sent(item, c, message.numel())
        if not operator.residual and len(operator.sizes(c.numel(), c.element_size())) == 1:
            out = torch.zeros_like(c)
            steps = operator.steps([copy], [0], draw, out)
            next(steps)
            with suppress(StopIteration):
                steps.send([message])
            self.left(item, c - out)

    def left(self, item: Item, residual: Tensor) -> None:
        """Record what the messages lack."""
        self._items[item.number] = replace(self._items[item.number], residual_norm=_norm(residual))

    def take(self) -> tuple[CompressedItem, ...]:
        """Return the items in model order; () if the iteration was not due, or a number overflowed."""
        by_number, self._items = self._items, {}
        items = [by_number[number] for number in sorted(by_number, reverse=True)]
        finite = all(math.isfinite(item.norm) and math.isfinite(item.residual_norm or 0.0) for item in items)
        return tuple(map(_rounded, items)) if finite else ()


def _rounded(item: CompressedItem) -> CompressedItem:
    """Add the kept share, and round to six digits: a log has many of them."""
    norm, lost, kept = item.norm, item.residual_norm, None
    if lost is not None:
        kept = float(f"{1 - (lost / norm) ** 2:.6g}") if norm else 1.0
        lost = float(f"{lost:.6g}")
    return replace(item, norm=float(f"{norm:.6g}"), residual_norm=lost, kept=kept)


def _norm(vector: Tensor) -> float:
    parts = [torch.linalg.vector_norm(vector[p], dtype=torch.float64) for p in pieces(vector)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))
