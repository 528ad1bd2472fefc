"""Long series made short enough to draw. Pure."""

from collections.abc import Sequence

from stagerun.report.history import Point


def chunks(points: Sequence[Point], size: int) -> list[Sequence[Point]]:
    """`size` points each, the last one fewer."""
    return [points[i : i + size] for i in range(0, len(points), size)]


def chunk_size(count: int, most: int) -> int:
    """The least size at which `count` points make at most `most` chunks."""
    return max(1, -(-count // most))


def mean_loss(points: Sequence[Point], size: int) -> tuple[list[float], list[float]]:
    """Epochs and losses, each the mean of `size` iterations."""
    parts = chunks(points, size)
    return (
        [sum(p.epoch for p in part) / len(part) for part in parts],
        [sum(p.loss for p in part) / len(part) for part in parts],
    )


def learning_rates(points: Sequence[Point], size: int) -> tuple[list[float], list[float]]:
    """Epochs and learning rates: of `size` iterations the first, the least, the largest and the last, in their order. So
    no peak and no step is lost."""
    kept: list[Point] = []
    for part in chunks(points, size):
        extremes = {part[0], part[-1], min(part, key=lambda p: p.lr), max(part, key=lambda p: p.lr)}
        kept += sorted(extremes, key=lambda p: p.iter)
    return [p.epoch for p in kept], [p.lr for p in kept]


def speed(points: Sequence[Point], size: int, begun: float, offset: float) -> tuple[list[float], list[float]]:
    """Seconds and images/s of one process life, over `size` iterations each. `begun` is its start on the clock, `offset`
    the second that it is counted as."""
    parts = [part for part in chunks(points, size) if sum(p.seconds for p in part)]
    return (
        [offset + (part[0].time + part[-1].time) / 2 - begun for part in parts],
        [sum(p.images for p in part) / sum(p.seconds for p in part) for part in parts],
    )
