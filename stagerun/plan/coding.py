"""What a stage that compresses its gradients or has replicas sends over a link, beside dense gradients, for `plan --link`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from stagerun.base.recipe import Method
from stagerun.base.text import columns, count, size
from stagerun.plan.link import Coding, Senders, Speeds, collectives, pays_below, ring_bytes, sent, wire, work
from stagerun.plan.prediction import Link, ring


@dataclass(frozen=True, slots=True)
class Rate:
    """What one number of a vector costs: nanoseconds to make a message and to add one up, and its bytes."""

    encode: float
    add: float
    size: float


# Of float32, by `scripts/bench coding` on one core of an AMD EPYC: an orientation, where AUTO hasn't measured the machine itself.
RATES: Mapping[Method, Rate] = {
    Method.NONE: Rate(0.15, 0.19, 4),
    Method.TOP_K: Rate(1.9, 0.27, 0.08),
    Method.RANDOM_K: Rate(13, 0.25, 0.04),
    Method.THRESHOLD: Rate(9.6, 17, 1.4),
    Method.ADAPTIVE_THRESHOLD: Rate(6.4, 0.4, 0.09),
    Method.TERNGRAD: Rate(19, 1.5, 0.25),
    Method.QSGD: Rate(37, 4.4, 0.87),
    Method.TWO_BIT: Rate(26, 2, 0.25),
    Method.SIGN: Rate(7.5, 1.7, 0.13),
    Method.POWER_SGD: Rate(13, 8.3, 0.031),
    Method.INT8: Rate(1.6, 1.1, 1),
    Method.BF16: Rate(0.22, 0.56, 2),
    Method.FP16: Rate(0.19, 0.43, 2),
    Method.LOSSLESS: Rate(9.2, 2.3, 3.3),
}
# Methods whose messages are as long as the gradients make them: what the table has for these is no promise.
BY_CONTENT = (Method.THRESHOLD, Method.ADAPTIVE_THRESHOLD, Method.QSGD, Method.LOSSLESS)
# Seconds that a message takes besides, each way.
PER_MESSAGE = 3e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One stage, or one method that its AUTO may choose. Bytes of a worker in an iteration; `seconds` on the link, `coding` to compress
    and to add up. `pays_below`: bytes per second; 0 where nothing is saved on any link, None where there is nothing to do for it."""

    stage: str
    method: str  # in words
    dense: float
    sent: float
    about: bool  # the gradients decide how much
    dense_seconds: float
    seconds: float
    coding: float
    pays_below: float | None
    measured: bool  # the costs are of this machine
    replicas: bool = False  # it is a mean over the stage's iterations


def sending(
    stage: str,
    method: str,
    chunks: Sequence[Sequence[Coding]],
    dense: Sequence[float],
    who: Senders,
    link: Link,
    *,
    about: bool = False,
    measured: bool = False,
) -> Sending:
    """`dense`: bytes of the tail and of the chunks of dense gradients, as a ring would have to send as much as is sent; the first of `chunks`
    is the tail, too."""
    speeds = Speeds.of(link, who.workers)
    whole, small = ring_bytes(sum(dense), who.workers), sum(sent(c, who) for chunk in chunks for c in chunk)
    coding = sum(work(c, who) for chunk in chunks for c in chunk)
    return Sending(
        stage=stage,
        method=method,
        dense=whole,
        sent=small,
        about=about,
        dense_seconds=sum(ring(each, who.workers, link) for each in dense),
        seconds=sum(wire(chunk, who, speeds) for chunk in chunks),
        coding=coding,
        pays_below=pays_below(whole, small, coding) if coding else None,
        measured=measured,
    )


def lossless(stage: str, rate: Rate, dense: Sequence[float], who: Senders, link: Link, measured: bool) -> Sending:
    """As `sending`; what crosses the ring is coded, 4 bytes a number, but for the tail, the first of `dense`."""
    tail, *gradients = dense
    share, whole = rate.size / 4, ring_bytes(sum(dense), who.workers)
    coded = ring_bytes(sum(gradients), who.workers)
    small = share * coded + ring_bytes(tail, who.workers)
    coding = 1e-9 * (rate.encode + rate.add) * coded / 4
    times = [ring(tail, who.workers, link), *(ring(share * g, who.workers, link) + 4 * link.latency for g in gradients)]
    return Sending(
        stage=stage,
        method=Method.LOSSLESS.value,
        dense=whole,
        sent=small,
        about=True,
        dense_seconds=sum(ring(each, who.workers, link) for each in dense),
        seconds=sum(times),
        coding=coding,
        pays_below=pays_below(whole, small, coding),
        measured=measured,
    )


@dataclass(frozen=True, slots=True)
class Share:
    """So many `times` in a stage a worker sends `bytes`, in so many `messages` one after the other, and compresses for `coding` seconds."""

    times: int
    bytes: float
    messages: int = 2
    coding: float = 0.0

    @classmethod
    def of(cls, times: int, codings: Sequence[Coding], who: Senders) -> "Share":
        return cls(times, sum(sent(c, who) for c in codings), collectives(codings), sum(work(c, who) for c in codings))

    def coded(self, rate: Rate) -> "Share":
        """By LOSSLESS."""
        return replace(self, bytes=self.bytes * rate.size / 4, coding=1e-9 * (rate.encode + rate.add) * self.bytes / 4)


def replicas(
    stage: str,
    method: str,
    dense: Sequence[float],
    shares: Sequence[Share],
    plain: Sequence[Share],
    iterations: int,
    workers: int,
    link: Link,
    about: bool = False,
) -> Sending:
    """What a stage sends whose replicas meet now and then: means over its iterations. `plain`: what it would send uncompressed; `dense` as of
    `sending`."""
    seconds = sum(s.times * (s.bytes / link.bandwidth + s.messages * link.latency) for s in shares if s.bytes)
    small, most = (sum(s.times * s.bytes for s in each) / iterations for each in (shares, plain))
    coding = sum(s.times * s.coding for s in shares) / iterations
    return Sending(
        stage=stage,
        method=method,
        dense=ring_bytes(sum(dense), workers),
        sent=small,
        about=about,
        dense_seconds=sum(ring(each, workers, link) for each in dense),
        seconds=seconds / iterations,
        coding=coding,
        pays_below=pays_below(most, small, coding) if coding else None,
        measured=False,
        replicas=True,
    )


def render_sending(found: Sequence[Sending], workers: int, link: Link) -> str:
    """The table, with what it leaves out."""
    rows: list[Sequence[str]] = [
        ("stage", "gradients", "dense", "sent", "of it", "link, dense", "link", "to compress", "pays below")
    ]
    for s in found:
        about = "about " * s.about
        rows.append(
            (
                s.stage,
                s.method,
                size(s.dense),
                f"{about}{size(s.sent)}",
                f"{100 * s.sent / s.dense:.3g} %",
                _time(s.dense_seconds),
                _time(s.seconds),
                _time(s.coding),
                "" if s.pays_below is None else rate_text(s.pays_below) if s.pays_below else "never",
            )
        )
    head = f"gradients of {count(workers, 'worker')} over {rate_text(link.bandwidth)}, {1e6 * link.latency:g} us: of one worker in an iteration"
    return "\n".join([head, "", *columns(rows), *(f"note: {text}" for text in _notes(found))])


def _notes(found: Sequence[Sending]) -> list[str]:
    compressing, replicas = [s for s in found if s.coding], [s for s in found if s.replicas]
    said = ["BatchNorm's statistics and the loss, which are sent as they are, are among all bytes"]
    if compressing:
        here = (
            "as AUTO measured it here"
            if all(s.measured for s in compressing)
            else "on one core (`scripts/bench coding`)"
        )
        said.append(
            f"to compress: {here}, and backward waits for it; pays below: the link on which what isn't sent saves as much time"
        )
    if replicas:
        said.append(
            "sent by replicas: on average over the stage's iterations, of which all but synchronisations send next to nothing"
        )
    return said


def sending_record(found: Sequence[Sending]) -> list[dict[str, object]]:
    """For `--json`, in seconds and bytes."""
    return [asdict(one) for one in found]


def rate_text(rate: float) -> str:
    """Bytes per second as `100 Mbit/s`."""
    bits, units = 8 * rate, iter(("bit/s", "kbit/s", "Mbit/s", "Gbit/s"))
    unit = next(units)
    while bits >= 1000 and (larger := next(units, "")):
        bits, unit = bits / 1000, larger
    return f"{bits:.3g} {unit}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
