"""How a method is driven (`Operator`), where its random numbers come from (`Draw`), and the base of methods of one round."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from stagerun.comm.compression.places import joined

# Each message is the bytes of a vector of its own (uint8 [bytes]); a round has one per sender.
Steps = Generator[list[Tensor], Sequence[Tensor], Tensor | None]

# Elements that are worked on at a time on a CPU: small enough for the L2 cache, and for torch not to start threads (it does from 32768
# on), which would take the cores of backward. A multiple of 512, the buckets of QSGD.
PIECE = 63 * 512


@dataclass(frozen=True, slots=True)
class Draw:
    """The key of random numbers. `sender` is -1 for those that all senders share; `item` is the number of the tensor in the order in
    which tensors are sent. The numbers are the same in every process life; on a GPU they are others than on a CPU."""

    seed: int
    iter: int
    sender: int
    item: int

    def of(self, sender: int) -> "Draw":
        return replace(self, sender=sender)

    def _seed(self) -> np.random.SeedSequence:
        return np.random.SeedSequence((self.seed, self.iter, self.sender + 1, self.item))

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        generator = torch.Generator(device)
        generator.manual_seed(int(self._seed().generate_state(1, np.uint64)[0]))
        return generator

    def bits(self) -> np.random.PCG64DXSM:
        """Its `random_raw` gives the same numbers in every version of numpy."""
        return np.random.PCG64DXSM(self._seed())

    def uniform(self, device: torch.device) -> Callable[[int], Tensor]:
        """A function that gives the next n numbers, even over the multiples of 2**-24 in [0, 1): float32 [n]. On a CPU all n but the last
        must be even."""
        if device.type != "cpu":
            generator = self.generator(device)
            return lambda n: torch.rand(n, generator=generator, device=device)
        bits = self.bits()

        def following(n: int) -> Tensor:
            raw = bits.random_raw((n + 1) // 2).view(np.uint32)[:n]
            return torch.from_numpy((raw >> 8).astype(np.float32)).mul_(2.0**-24)

        return following


class Operator:
    residual: bool
    """Whether it turns what it compresses into what it left out."""

    def wire(self, dtype: torch.dtype) -> torch.dtype | None:
        """To which type each number, and then each sum, is rounded, of a method that does no more: a reducer then adds up slices rather than
        call `steps`. None of every other."""
        return None

    def basis(self) -> tuple[int, int] | None:
        """The shape of what `steps` returns, where it returns something."""
        return None

    def sizes(self, n: int, element_size: int) -> tuple[int | None, ...]:
        """Bytes of a sender's message in each round: as many as there are rounds. None: it varies, so lengths are sent first. Never more
        than the vector has, over all rounds."""
        raise NotImplementedError

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        """Compresses one tensor in one iteration; see `stagerun.comm.compression`."""
        raise NotImplementedError


def pieces(n: int, device: torch.device) -> Iterator[slice]:
    """What is worked on at a time: all of it on a GPU."""
    step = PIECE if device.type == "cpu" else max(n, 1)
    return (slice(at, min(at + step, n)) for at in range(0, n, step))


def to_bytes(values: Tensor) -> Tensor:
    if not values.numel():  # what came from numpy then has a stride of 0, which torch refuses to view
        return values.new_empty(0, dtype=torch.uint8)
    return values.contiguous().view(-1).view(torch.uint8)


def from_bytes(message: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that the bytes are; a copy if they don't lie where such numbers may."""
    if not message.numel():
        return message.new_empty(0, dtype=dtype)
    if message.storage_offset() % dtype.itemsize or message.data_ptr() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)


def largest_of(vector: Tensor) -> Tensor:
    """[1]: the largest |v|; NaN if there is one."""
    top = vector.new_zeros(1)
    for p in pieces(vector.numel(), vector.device):
        top = torch.maximum(top, vector[p].abs().amax())
    return top


def take(value: Tensor, out: Tensor, vector: Tensor | None) -> None:
    """Adds a decoded piece to the sum and, where the sender is this rank's own, takes it from what was to be sent."""
    for p in pieces(out.numel(), out.device):
        out[p].add_(value[p])
        if vector is not None:
            vector[p].sub_(value[p])


class OneRound(Operator):
    """A method whose senders each send one message. A subclass gives `size`, `encode` and `add`; encoding never changes the vector.

    A message as long as the vector itself is the decoded vector: that is how a method that would save nothing goes.
    """

    def size(self, n: int, element_size: int) -> int | None:
        raise NotImplementedError

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        """The message: uint8 [bytes], on the device of the vector, which is contiguous, float32 or float64. `draw` has the sender."""
        raise NotImplementedError

    def add(self, message: Tensor, out: Tensor, draw: Draw, vector: Tensor | None = None) -> None:
        """out += decoded message, the same bits on every rank; and vector -= decoded, if given."""
        raise NotImplementedError

    def sizes(self, n: int, element_size: int) -> tuple[int | None, ...]:
        return (self.size(n, element_size),)

    def steps(
        self, vectors: Sequence[Tensor], senders: Sequence[int], draw: Draw, out: Tensor, state: Tensor | None = None
    ) -> Steps:
        messages = yield [self.encode(v, draw.of(s)) for v, s in zip(vectors, senders, strict=True)]
        own = dict(zip(senders, vectors, strict=True)) if self.residual else {}
        for sender, message in enumerate(messages):
            self.add(message, out, draw.of(sender), own.get(sender))
        return None


class Fixed(OneRound):
    """A method of one round whose message's length follows from n. Where that isn't below the vector's own, the vector goes as it is."""

    def coded(self, n: int, element_size: int) -> int:
        """Bytes of what `encode_all` gives."""
        raise NotImplementedError

    def encode_all(self, vector: Tensor, draw: Draw) -> Tensor:
        raise NotImplementedError

    def decode_all(self, message: Tensor, out: Tensor, vector: Tensor | None) -> None:
        raise NotImplementedError

    def size(self, n: int, element_size: int) -> int:
        return min(self.coded(n, element_size), n * element_size)

    def encode(self, vector: Tensor, draw: Draw) -> Tensor:
        n, width = vector.numel(), vector.element_size()
        # A copy in any case: the vector becomes a residual while its message is still sent.
        return self.encode_all(vector, draw) if self.coded(n, width) < n * width else joined([to_bytes(vector)])

    def add(self, message: Tensor, out: Tensor, draw: Draw, vector: Tensor | None = None) -> None:
        expect(message, self.size(out.numel(), out.element_size()))
        if message.numel() == out.numel() * out.element_size():
            take(from_bytes(message, out.dtype), out, vector)
        else:
            self.decode_all(message, out, vector)


def expect(message: Tensor, length: int) -> None:
    if message.numel() != length:
        raise ValueError(f"a sender's message has {message.numel()} bytes; {length} were expected")
