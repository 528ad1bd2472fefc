"""Compressed gradients: the message sent instead of a vector, and its contribution to the sum.

A reducer has one operator per tensor (ENTIRE_MODEL: one of shape [n]), and drives it once per iteration:

    steps = operator.steps(vectors, senders, Draw(seed, iter, -1, item), out, state)
    messages = next(steps)                   # round 1: a message per sender of this rank
    try:
        while True:
            received = ...                   # of all senders of the job, in their order
            messages = steps.send(received)  # the next round's messages
    except StopIteration as ended:
        new_state = ended.value

- `vectors`: what this rank's senders have to send (gradient plus residual), each contiguous, 1-D, float32 or float64. With a memory
  each becomes its sender's new residual, c - d; without, its contents are lost.
- `senders`: the numbers of this rank's senders, growing. A sender's number is its index in `received`.
- `out`: [n], like the vectors, zeros to begin with. At the end it holds the sum of all senders' d, added in their order: the same bits on
  every rank.
- `draw`: of this seed, iteration and tensor. It has the sender -1; operators put their senders in.
- `state`: None at first, then the previous iteration's result: a tensor that is the same on all ranks, and belongs into snapshots. Most
  methods return None. The argument is never changed, so an update that isn't made keeps it, as it keeps the residuals.

A message is uint8 [bytes], on the vectors' device. It is never longer than the vector, and needn't be aligned when it is received. It
stays unchanged after the next round starts. An impossible length raises ValueError.

Operators keep nothing between iterations. Work is done in the calling thread, on a CPU in pieces for which torch starts no
threads. What is NaN or infinite in a vector is not finite in `out` somewhere; residuals and state are invalid then.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Each message is a separate uint8 vector; a round has one per sender.
Steps = Generator[list[Tensor], Sequence[Tensor], Tensor | None]

Piece = tuple[slice, Tensor]  # a part of a vector, and its numbers

# Elements that are worked on at a time on a CPU: small enough for the L2 cache, and for torch not to start threads (it does from 32768
# on), which would take the cores of backward. A multiple of 512, the buckets of QSGD.
PIECE = 63 * 512


def pieces(vector: Tensor) -> Iterator[slice]:
    """Yield the parts of a vector, or of a matrix's rows, to work on at a time: all at once on a GPU."""
    n = len(vector)
    step = PIECE if vector.device.type == "cpu" else max(n, 1)
    return (slice(at, min(at + step, n)) for at in range(0, n, step))


def by_pieces(do: Callable[..., Tensor], *vectors: Tensor) -> None:
    """Apply `do` piece by piece: on a CPU without torch's threads, which would take the cores of backward."""
    for p in pieces(vectors[0]):
        do(*(vector[p] for vector in vectors))


@dataclass(frozen=True, slots=True)
class Draw:
    """The key of random numbers. `sender` is -1 for numbers that all senders share; `item` counts tensors in the order of
    sending. The numbers are the same in every process; a GPU's differ from a CPU's."""

    seed: int
    iter: int
    sender: int
    item: int

    def of(self, sender: int) -> "Draw":
        return replace(self, sender=sender)

    def uniform(self, device: torch.device) -> Callable[[int], Tensor]:
        """Return a function that draws the next n numbers, even over the multiples of 2**-24 in [0, 1): float32 [n]. On a CPU all n but the last
        must be even; every version of numpy gives the same."""
        seeds = np.random.SeedSequence((self.seed, self.iter, self.sender + 1, self.item))
        if device.type != "cpu":
            generator = torch.Generator(device)
            generator.manual_seed(int(seeds.generate_state(1, np.uint64)[0]))
            return lambda n: torch.rand(n, generator=generator, device=device)
        bits = np.random.PCG64DXSM(seeds)

        def following(n: int) -> Tensor:
            raw = bits.random_raw((n + 1) // 2).view(np.uint32)[:n]
            return torch.from_numpy((raw >> 8).astype(np.float32)).mul_(2.0**-24)

        return following


class Operator:
    """A method of compression, for one tensor. A subclass has its formula."""

    residual: bool
    """Whether `steps` turns vectors into residuals."""

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """Return the type to which numbers and then sums are rounded, if the method does nothing else: a reducer then adds slices instead of
        calling `steps`. None for all other methods."""
        return None

    def basis(self) -> tuple[int, int] | None:
        """Return the shape of the state that `steps` returns, if any."""
        return None

    def sizes(self, n: int, element_size: int) -> tuple[int | None, ...]:
        """Return the bytes of a sender's message for each round. None: it varies, so lengths are sent first. Never more than the vector has,
        over all rounds."""
        raise NotImplementedError

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        """Compress one tensor in one iteration; see above."""
        raise NotImplementedError


class OneRound(Operator):
    """A method whose senders each send one message. A message as long as the vector itself is the decoded vector: so goes a method that
    would save nothing."""

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        """Return the message: uint8 [bytes], on the device of the vector, which stays unchanged. `draw` has the sender."""
        raise NotImplementedError

    def decoded(self, message: Tensor, like: Tensor) -> Iterator[Piece]:
        """Yield the decoded message, a vector as `like`: the same bits on every rank."""
        raise NotImplementedError

    def decode(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        """out += the decoded message; and vector -= decoded, if not None."""
        take(self.decoded(message, out), out, vector)

    def sizes(self, n: int, element_size: int) -> tuple[int | None]:
        return (None,)

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        messages = yield [self.encode(v, draw.of(s)) for v, s in zip(vectors, senders, strict=True)]
        residuals = dict(zip(senders, vectors, strict=True)) if self.residual else {}
        (fixed,) = self.sizes(out.numel(), out.element_size())
        for sender, message in enumerate(messages):
            if fixed is not None:
                expect(message, fixed)
            if message.numel() == out.nbytes:
                take(numbers(message, out.dtype), out, residuals.get(sender))
            else:
                self.decode(message, out, residuals.get(sender))
        return None


class Fixed(OneRound):
    """A method of one round whose message's length follows from n. Where that isn't below the vector's, the vector goes as it is."""

    def coded(self, n: int, element_size: int) -> int:
        """Return the bytes of `encode_all`'s message; those of the vector if nothing is encoded."""
        return n * element_size

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        raise NotImplementedError

    def sizes(self, n: int, element_size: int) -> tuple[int]:
        return (min(self.coded(n, element_size), n * element_size),)

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        if self.coded(vector.numel(), vector.element_size()) < vector.nbytes:
            return self.encode_all(vector, draw)
        return joined([to_bytes(vector)])  # a copy: the vector becomes a residual while its message is still sent


@dataclass(frozen=True, slots=True)
class Dense(Fixed):
    """d = c: NONE, for parameters that a rule leaves as they are."""

    residual: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        return dtype


@dataclass(frozen=True, slots=True)
class BFloat16(Fixed):
    """d = c rounded to bfloat16, to nearest even; float64 is rounded to float32 first. Without a memory slices are added up by one rank
    each, which hands out the sum rounded once more: so the bytes fall to a half for any number of workers, and not for a few alone. A
    residual would not have that second error, so with a memory every sender's d goes to all."""

    residual: bool

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        return None if self.residual else torch.bfloat16

    def coded(self, n: int, element_size: int) -> int:
        return 2 * n

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        message = torch.empty_like(vector, dtype=torch.bfloat16)
        for p in pieces(vector):
            message[p] = vector[p].float()
        return to_bytes(message)

    def decoded(self, message: Tensor, like: Tensor) -> Iterator[Piece]:
        return numbers(message, torch.bfloat16)


# -- bytes and numbers


def expect(message: Tensor, length: int) -> None:
    if message.numel() != length:
        raise ValueError(f"a sender's message has {message.numel()} bytes; {length} were expected")


def to_bytes(values: Tensor) -> Tensor:
    if not values.numel():  # numpy's then has a stride of 0, which torch refuses to view
        return values.new_empty(0, dtype=torch.uint8)
    return values.contiguous().view(-1).view(torch.uint8)


def from_bytes(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers in the bytes; a copy if these aren't aligned."""
    if not message.numel():
        return message.new_empty(0, dtype=dtype)
    if message.storage_offset() % dtype.itemsize or message.data_ptr() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)


def largest_of(vector: Tensor) -> Tensor:
    """Return [1]: the largest |v|; NaN if any is NaN."""
    top = vector.new_zeros(1)
    for p in pieces(vector):
        top = torch.maximum(top, vector[p].abs().amax())
    return top


def numbers(message: Tensor, dtype: torch.dtype) -> Iterator[Piece]:
    """Yield the numbers in the bytes."""
    whole = from_bytes(message, dtype)
    return ((p, whole[p]) for p in pieces(whole))


def take(decoded: Iterable[Piece], out: Tensor, vector: Tensor | None) -> None:
    """Add a decoded vector to the sum and subtract it from `vector`, what a sender of this rank had to send."""
    for p, value in decoded:
        out[p].add_(value)
        if vector is not None:
            vector[p].sub_(value)


# -- numbers at some indices of a vector, and vectors made of others, on a CPU by numpy: torch starts threads at a few thousand
# elements; with backward on all cores, waiting for them took 100 ms for 40 kB.


def nonzero(mask: Tensor) -> Tensor:
    """Return the indices of nonzero elements: int64, growing."""
    if mask.device.type != "cpu":
        return torch.nonzero(mask).view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def picked(vector: Tensor, index: Tensor) -> Tensor:
    return torch.as_tensor(_array(vector)[_array(index)])


def put(vector: Tensor, index: Tensor, values: Tensor | int) -> None:
    _array(vector)[_array(index)] = _array(values) if isinstance(values, Tensor) else values


def joined(parts: Sequence[Tensor]) -> Tensor:
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate([p.numpy() for p in parts]))


def zero_bytes(like: Tensor, *shape: int) -> Tensor:
    """Return uint8 zeros on the device of `like`."""
    if like.device.type != "cpu":
        return like.new_zeros(shape, dtype=torch.uint8)
    return torch.from_numpy(np.zeros(shape, np.uint8))


def _array(tensor: Tensor) -> Any:
    """Return the tensor, on a CPU as numpy's view of it; both are indexed alike."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


# -- codes of a few bits, packed: code i of each eight is in bits i*width and up of the eight codes' `width` bytes, lowest first. Eight codes
# are moved at a time, as the bytes of one 64-bit word. Words are little-endian, as on every machine that torch runs on.

_LOW = (0x00FF00FF00FF00FF, 0x0000FFFF0000FFFF, 0x00000000FFFFFFFF)  # the lower halves of lanes of 16, 32 and 64 bits


def pack(codes: Tensor, width: int) -> Tensor:
    """uint8 [m width] from codes uint8 [8 m], each below 2**width."""
    if width == 8:
        return codes
    words = codes.view(torch.int64)
    packed = torch.empty(len(words), width, dtype=torch.uint8, device=codes.device)
    for p in pieces(words):
        word = words[p]
        for step, low in enumerate(_LOW):
            word = (word & low) | ((word & ~low) >> ((8 - width) << step))
        packed[p] = word.view(torch.uint8).view(-1, 8)[:, :width]
    return packed.view(-1)


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Return the codes: uint8 [count], a multiple of 8."""
    if width == 8:
        return packed
    codes = zero_bytes(packed, count)
    words, rows = codes.view(torch.int64), packed.view(-1, width)
    for p in pieces(words):
        word = words[p]
        word.view(torch.uint8).view(-1, 8)[:, :width] = rows[p]
        for step in (2, 1, 0):
            bits = width << step  # of a lane's lower half
            low = sum(((1 << bits) - 1) << at for at in range(0, 64, 16 << step))
            word = (word & low) | ((word & ~low) << ((8 << step) - bits))
        words[p] = word
    return codes
