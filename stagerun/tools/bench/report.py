"""What `bench scaling` measured: speed, efficiency and shares by number of workers, as text, JSON and a picture."""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from stagerun.base.spans import BACKWARD, DATA, FORWARD, UPDATE, WAIT
from stagerun.base.text import columns, count
from stagerun.drawing.colours import GRID, RULE, SOFT
from stagerun.drawing.figure import drawing, saved_png, saved_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Published:
    """`workers`: machines or GPUs, as `unit` says. `efficiency`: speed over `workers` times the speed of one, 1.0 where each does as much
    as alone. The work of each worker is the same for any number of them (weak scaling), or not reported."""

    system: str
    network: str
    workers: int
    unit: str
    efficiency: float
    images_per_second: float | None
    source: str


_MXNET = "apache/mxnet, example/image-classification"
_DELL = "Dell HPC note, March 2018"
PUBLISHED = (
    Published("MXNet", "Inception-BN-28-small", 2, "GTX 980", 0.97, 1640, "apache/mxnet@31f26bba76"),
    Published("MXNet", "Inception-BN-28-small", 4, "GTX 980", 0.87, 2943, "apache/mxnet@31f26bba76"),
    Published("MXNet", "ResNet-152", 64, "GPUs of EC2 P2", 0.92, 1179.86, _MXNET),
    Published("MXNet", "ResNet-152", 256, "GPUs of EC2 P2", 0.90, 4630.42, _MXNET),
    Published("MXNet", "Inception-v3", 256, "GPUs of EC2 P2", 0.86, 6660.98, _MXNET),
    Published("MXNet", "AlexNet", 256, "GPUs of EC2 P2", 0.53, 61938.36, _MXNET),
    Published("Intel Caffe (Dell)", "ResNet-50", 128, "nodes", 0.90, None, _DELL),
    Published("Intel Caffe (Dell)", "ResNet-50", 256, "nodes", 0.83, None, _DELL),
    Published("Intel Caffe (Dell)", "ResNet-50", 314, "nodes", 0.76, None, _DELL),
    Published("TensorFlow + Horovod", "ResNet-50", 256, "nodes", 0.81, 16400, "README of the 24K-batch run"),
    Published("Horovod", "Inception-v3, ResNet-101", 512, "GPUs", 0.90, None, "Horovod's documentation"),
    Published("Horovod", "VGG-16", 512, "GPUs", 0.68, None, "Horovod's documentation"),
)


# -- measured here

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
    """One number of workers; medians over rounds. `efficiency` is against the fewest workers, in the same round: 1.0 where
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
    """What it was measured with. `sharing`: most workers on one host, which has `processors`."""

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
    """The share of the device batches that the workers could do in an iteration's time."""
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
    return "\n".join([*columns(table), "", *said, "", *_published_lines()])


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
    if measured.synthetic:
        said.append(
            f"synthetic images ({measured.synthetic}), in memory: waiting for data would be another with real ones"
        )
    return said


def _published_lines() -> list[str]:
    table: list[Sequence[str]] = [("system", "network", "workers", "efficiency", "images/s", "source")]
    for p in PUBLISHED:
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


# -- the picture

_PARTS = (("computing", "#4c78a8"), ("communicating", "#e45756"), ("waiting for data", "#f2b134"))
_MARKERS = ("x", "+", "^", "s", "d", "v")


def scaling_picture(found: Sequence[Row], measured: Measured, png: bool) -> bytes:
    """An SVG, or a PNG. UsageError without matplotlib."""
    with drawing():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.6), dpi=72, facecolor="white", layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        _efficiency(left, found)
        _shares(right, found)
        figure.suptitle(
            f"{measured.schedule}, stage {measured.stage}: {measured.batch_size} images per iteration on {measured.device}",
            size=11,
        )
        return saved_png(figure) if png else saved_svg(figure, measured.schedule).encode()


def _efficiency(axes: "Axes", found: Sequence[Row]) -> None:
    for system, marker in zip(dict.fromkeys(p.system for p in PUBLISHED), _MARKERS, strict=False):
        points = [(p.workers, p.efficiency) for p in PUBLISHED if p.system == system]
        axes.plot(*zip(*points, strict=True), marker, color=SOFT, zorder=2, label=f"published: {system}")
    fewest = found[0]
    # What the range of speeds would make of the efficiency.
    low = [row.efficiency * (1 - row.low / row.images_per_second) for row in found]
    high = [row.efficiency * (row.high / row.images_per_second - 1) for row in found]
    axes.errorbar(
        [row.workers for row in found], [row.efficiency for row in found], yerr=[low, high], marker="o", color="#4c78a8", capsize=3,
        label="measured here, strong scaling (range of the speeds)", zorder=3,
    )  # fmt: skip
    axes.axhline(1.0, color=RULE, linewidth=0.9)
    axes.set_xscale("log", base=2)
    ticks = [2**n for n in range(10)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_ylim(0, max(1.1, *(row.efficiency + h for row, h in zip(found, high, strict=True))))
    axes.set_xlabel("workers")
    axes.set_ylabel(f"efficiency against {fewest.workers}")
    axes.grid(color=GRID)
    axes.legend(loc="lower left", fontsize=7)


def _shares(axes: "Axes", found: Sequence[Row]) -> None:
    names = [str(row.workers) for row in found]
    below = [0.0] * len(found)
    for (title, colour), values in zip(
        _PARTS, zip(*((r.computing, r.communicating, r.waiting) for r in found), strict=True), strict=True
    ):
        axes.bar(names, values, bottom=below, color=colour, label=title)
        below = [b + v for b, v in zip(below, values, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_xlabel("workers")
    axes.set_ylabel("share of an iteration")
    axes.legend(loc="lower right", fontsize=7)
