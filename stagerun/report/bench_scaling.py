"""What `bench scaling` measured: speed, efficiency and shares by number of workers, as text and JSON. Pure."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from stagerun.report.published import PUBLISHED, Published
from stagerun.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT
from stagerun.text import columns, count

# Iterations of a turn that don't count: they are fed by batches made ahead, and find the caches full of another turn's.
WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's seconds of a turn, and of its parts, summed over its iterations; as of `spans.Overlap` what was under way on the
    network, and how much of that while backward went on."""

    host: str
    seconds: float
    parts: Mapping[str, float]
    sending: float = 0.0
    hidden: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    round: int
    workers: int
    iterations: int
    shares: tuple[Share, ...]  # by rank

    @property
    def step(self) -> float:
        """Seconds of an iteration, of the slowest rank."""
        return max(share.seconds for share in self.shares) / self.iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of one number of workers; medians over rounds. `efficiency` is against the fewest workers, in the same round: 1.0 where
    each does as much as there. `computing`, `communicating` and `waiting` (for data) are shares of an iteration, means over ranks; the
    first has forward, backward and update in it, the second only what is left of the sum of the gradients after backward.
    `best`: the highest efficiency there can be, where device batches can't be dealt out evenly."""

    workers: int
    images_per_second: float
    low: float
    high: float
    efficiency: float
    computing: float
    communicating: float
    waiting: float
    step: float  # seconds
    sending: float  # seconds of an iteration in which gradients were under way
    hidden: float  # of these, while backward went on
    hosts: int
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What it was measured with. `sharing`: most workers on one host, which has `processors`. `bound`: what was said of binding all
    workers; '' where they are not."""

    schedule: str
    stage: str
    device: str
    batch_size: int
    logical_workers: int
    threads: int
    processors: int
    sharing: int
    synthetic: str
    rounds: int
    iterations: int
    bound: str = ""


def rows(turns: Sequence[Turn], batch_size: int, logical_workers: int) -> list[Row]:
    """One for each number of workers, growing."""
    counts = sorted({turn.workers for turn in turns})
    of = {workers: [turn for turn in turns if turn.workers == workers] for workers in counts}
    steps = {workers: {turn.round: turn.step for turn in of[workers]} for workers in counts}
    fewest = counts[0]
    found = []
    for workers in counts:
        speeds = [batch_size / step for step in steps[workers].values()]
        gains = [steps[fewest][turn.round] / turn.step * fewest / workers for turn in of[workers]]
        shares = [share for turn in of[workers] for share in turn.shares]
        done = sum(turn.iterations * len(turn.shares) for turn in of[workers])
        found.append(
            Row(
                workers=workers,
                images_per_second=statistics.median(speeds),
                low=min(speeds),
                high=max(speeds),
                efficiency=statistics.median(gains),
                computing=_share(shares, FORWARD, BACKWARD, UPDATE),
                communicating=_share(shares, WAIT),
                waiting=_share(shares, DATA),
                step=statistics.median(steps[workers].values()),
                sending=sum(share.sending for share in shares) / done,
                hidden=sum(share.hidden for share in shares) / done,
                hosts=len({share.host for turn in of[workers] for share in turn.shares}),
                best=_best(logical_workers, workers) / _best(logical_workers, fewest),
            )
        )
    return found


def _share(shares: Sequence[Share], *names: str) -> float:
    whole = sum(sum(share.parts.values()) for share in shares)
    return sum(share.parts[name] for share in shares for name in names) / whole if whole else 0.0


def _best(logical_workers: int, workers: int) -> float:
    """Of the device batches that the workers could do in an iteration's time, how many there are."""
    return logical_workers / (workers * -(-logical_workers // workers))


def sharing(turns: Sequence[Turn]) -> int:
    """Most workers on one host."""
    return max(max(Counter(share.host for share in turn.shares).values()) for turn in turns)


_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("workers", lambda row: str(row.workers)),
    ("images/s", lambda row: f"{row.images_per_second:.4g}"),
    ("range", lambda row: f"{row.low:.4g} - {row.high:.4g}"),
    ("efficiency", lambda row: f"{row.efficiency:.3f}"),
    ("iteration", lambda row: f"{1000 * row.step:.1f} ms"),
    ("computing", lambda row: f"{row.computing:.1%}"),
    ("communicating", lambda row: f"{row.communicating:.1%}"),
    ("waiting for data", lambda row: f"{row.waiting:.1%}"),
    ("hidden", lambda row: f"{row.hidden / row.sending:.0%} of {1000 * row.sending:.1f} ms" if row.sending else ""),
)


def render(found: Sequence[Row], measured: Measured) -> str:
    table = [[title for title, _ in _COLUMNS], *([text(row) for _, text in _COLUMNS] for row in found)]
    said = [f"note: {text}" for text in notes(found, measured)]
    return "\n".join([*columns(table), "", *said, "", *published_lines()])


def notes(found: Sequence[Row], measured: Measured) -> list[str]:
    """What the figures mean, and what they don't; one sentence each."""
    said = [
        f"strong scaling: an iteration is {measured.batch_size} images for any number of workers, {count(measured.threads, 'thread')} each",
        "communicating: from the end of backward until the gradients are summed, with the wait for slower workers; hidden: what of "
        "their way lies within backward; medians and range over rounds, efficiency within each round",
    ]
    uneven = [f"{row.workers} ({row.best:.2f} at best)" for row in found if row.best < 0.999]
    if uneven:
        said.append(f"{measured.logical_workers} device batches can't be dealt out evenly to {', '.join(uneven)}")
    if measured.sharing > 1 and measured.device == "cpu":
        over = ""
        if measured.sharing * measured.threads > measured.processors:
            over = f", which are fewer than their {measured.sharing * measured.threads} threads"
        said.append(
            f"up to {count(measured.sharing, 'worker')} share the {count(measured.processors, 'processor')} of one machine{over}: how "
            "they get in each other's way there says nothing of a cluster"
        )
    if measured.bound:
        said.append(f"{measured.bound}; a turn with fewer workers leaves the cores of the others idle")
    if measured.synthetic:
        said.append(
            f"synthetic images ({measured.synthetic}), in memory: waiting for data would be another with real ones"
        )
    return said


def published_lines(points: Sequence[Published] = PUBLISHED) -> list[str]:
    table: list[Sequence[str]] = [("system", "network", "workers", "efficiency", "images/s", "source")]
    for p in points:
        speed = f"{p.images_per_second:.5g}" if p.images_per_second else ""
        table.append((p.system, p.network, f"{p.workers} {p.unit}", f"{p.efficiency:.2f}", speed, p.source))
    return [
        "published by others, mostly with as many images for each worker whatever their number (weak scaling):",
        *columns(table),
    ]


def as_record(found: Sequence[Row], measured: Measured, turns: Sequence[Turn]) -> dict[str, object]:
    return {
        **asdict(measured),
        "scaling": "strong",
        "rows": [asdict(row) for row in found],
        "turns": [{"round": t.round, "workers": t.workers, "seconds": t.step} for t in turns],
        "notes": notes(found, measured),
        "published": [asdict(p) for p in PUBLISHED],
    }
