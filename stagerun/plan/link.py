"""What gradients cost on the link between workers, dense and compressed: bytes, seconds on the wire, seconds to compress. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stagerun.plan.prediction import OVERLAP, Link, ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """One tensor by one method. `rounds`: bytes of a sender's message in each; `varies`: they differ, so that lengths are sent first.

    `slices`: the type of numbers that are only rounded, of which each worker adds up a slice for all; '' where every worker gets
    every message. `encode` and `add`: seconds to make a message, and to add one up.
    """

    rounds: tuple[float, ...]
    slices: str = ""
    varies: bool = False
    encode: float = 0.0
    add: float = 0.0


@dataclass(frozen=True, slots=True)
class Senders:
    """`senders` in all: the workers with `determinism: FIXED`, the logical workers with ELASTIC."""

    workers: int
    senders: int

    @property
    def own(self) -> int:
        """Those of the busiest worker."""
        return -(-self.senders // self.workers)


@dataclass(frozen=True, slots=True)
class Speeds:
    """The link as collectives reach it: sums over a ring, and messages for all. `latency` is that of a whole collective."""

    ring: Link
    messages: Link

    @classmethod
    def of(cls, link: Link, workers: int) -> "Speeds":
        """From the latency of one message."""
        return cls(Link(link.bandwidth, 2 * (workers - 1) * link.latency), link)


def ring_bytes(size: float, workers: int) -> float:
    """What a worker sends of a sum of `size` bytes over a ring: 2 (W-1)/W of them."""
    return 2 * (workers - 1) / workers * size


def sent(coding: Coding, who: Senders) -> float:
    """Bytes that the busiest worker sends for one tensor. A message goes to each of the other workers. Of what is only rounded, a slice
    of each sender's goes to the worker that adds it up, and the sum of one's own slice to all: (own + 1) (W-1)/W of the bytes."""
    others = who.workers - 1
    if coding.slices:
        return (who.own + 1) * others / who.workers * sum(coding.rounds)
    return who.own * others * sum(coding.rounds)


def work(coding: Coding, who: Senders) -> float:
    """Seconds in which the busiest worker compresses what it sends, and adds up what it gets."""
    added = who.senders / who.workers if coding.slices else who.senders
    return who.own * coding.encode + added * coding.add


def collectives(chunk: Iterable[Coding]) -> int:
    """How many a chunk takes: two for each type of slices; of messages one per round, and one for lengths that vary."""
    slices, rounds, varies = set(), 0, False
    for coding in chunk:
        if coding.slices:
            slices.add(coding.slices)
        else:
            rounds, varies = max(rounds, len(coding.rounds)), varies or coding.varies
    return 2 * len(slices) + rounds + varies


def wire(chunk: Sequence[Coding], who: Senders, speeds: Speeds) -> float:
    """Seconds on the wire of a chunk."""
    link = speeds.messages
    return sum(sent(coding, who) for coding in chunk) / link.bandwidth + collectives(chunk) * link.latency


def exposed(times: Sequence[float], one_pass: float) -> float:
    """Seconds that are left of the chunks' after backward, which hides all but the last as far as it lasts."""
    return sum(times) - min(OVERLAP * one_pass * 2 / 3, sum(times[:-1]))


def compressed_step(
    chunks: Sequence[Sequence[Coding]], who: Senders, speeds: Speeds, computing: float, one_pass: float
) -> float:
    """Seconds of an iteration. To compress takes the processor, or the GPU, from backward, and is hidden by nothing."""
    busy = sum(work(coding, who) for chunk in chunks for coding in chunk)
    return computing + busy + exposed([wire(chunk, who, speeds) for chunk in chunks], one_pass)


def dense_step(sizes: Sequence[float], workers: int, speeds: Speeds, computing: float, one_pass: float) -> float:
    """Seconds of an iteration that sends chunks of so many bytes as they are."""
    link = Link(speeds.ring.bandwidth)
    times = [ring(size, workers, link) + speeds.ring.latency for size in sizes]
    return computing + exposed(times, one_pass)


def lossless_step(
    sizes: Sequence[float],
    share: float,
    seconds: float,
    workers: int,
    speeds: Speeds,
    computing: float,
    one_pass: float,
) -> float:
    """Seconds of an iteration that sends the same chunks in a `share` of the bytes. `seconds` to code and to decode a byte of them: each
    worker does as it sends, 2 (W-1)/W times. A sum is two collectives, and lengths go before each."""
    link = Link(speeds.ring.bandwidth)
    times = [ring(share * size, workers, link) + 4 * speeds.messages.latency for size in sizes]
    return computing + seconds * ring_bytes(sum(sizes), workers) + exposed(times, one_pass)


def cheapest(codings: Mapping[str, Coding], who: Senders, speeds: Speeds) -> str:
    """The method of one tensor that takes the least time on the wire and to compress; the first of several."""

    def cost(name: str) -> float:
        return sent(codings[name], who) / speeds.messages.bandwidth + work(codings[name], who)

    return min(codings, key=cost)


def pays_below(dense: float, compressed: float, seconds: float) -> float:
    """The bandwidth, in bytes per second, below which the time that fewer bytes save is more than the `seconds` it takes to compress
    them; 0 where they are not fewer."""
    if compressed >= dense:
        return 0.0
    return (dense - compressed) / seconds if seconds else math.inf
