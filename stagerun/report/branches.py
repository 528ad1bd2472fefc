"""What the curves of a report show: points, lines of stages, colours; and a caption. Pure."""

from collections.abc import Sequence

from stagerun.events import EnsembleTested
from stagerun.report.history import StageHistory
from stagerun.report.plots.colours import COLOURS, CURVES, DASHES, INK
from stagerun.report.plots.html import variable
from stagerun.report.runs import Run

POINTS = 900  # in each panel, shared by the runs
LEAST_POINTS = 60  # of one run

COLUMNS = ("top1", "loss", "lr")  # of a point, after its series, iteration and epoch; `loss` of training or validation


def most(runs: int) -> int:
    """Points of a run's curve where so many runs share a panel."""
    return max(LEAST_POINTS, POINTS // runs)


def colour(number: int) -> tuple[str, str]:
    """Colour and dashes of the run, or of one run's branch, with that number, 0-based."""
    return CURVES[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)]


def begun(run: Run) -> list[StageHistory]:
    return [stage for stage in run.history.stages if stage.trained]


def lanes(run: Run) -> dict[str, int]:
    """The line of each stage that has started. The first to go on from its parent's end shares the parent's; 0 is the trunk's."""
    found: dict[str, int] = {}
    followed: set[str] = set()
    for stage in begun(run):
        parent = run.history.follows(stage)
        goes_on = parent is not None and parent.name in found and parent.name not in followed
        found[stage.name] = found[parent.name] if parent and goes_on else max(found.values(), default=-1) + 1
        followed |= {parent.name} if parent and goes_on else set()
    return found


def extents(run: Run) -> tuple[tuple[str, float, float], ...]:
    """Name, first and last epoch of each stage that has started, as far as it will go."""

    def end(stage: StageHistory) -> float:
        return stage.begin + stage.epochs * stage.max_iter / stage.iter if stage.iter else stage.begin

    return tuple((s.name, round(s.begin, 3), round(end(s), 3)) for s in begun(run))


def hues(run: Run, number: int | None) -> list[tuple[StageHistory, str, str]]:
    """Colour and dashes of each stage: its run's, or where that is the only one (None) its branch's."""
    found = lanes(run)
    return [(s, *colour(found.get(s.name, 0) if number is None else number)) for s in run.history.stages]


def lines(runs: Sequence[Run]) -> list[tuple[Run, StageHistory, str, str]]:
    """All stages, with colour and dashes; those of the first run last, so that it lies on top."""
    numbered = [(run, None if len(runs) == 1 else n) for n, run in enumerate(runs)]
    return [(run, *line) for run, number in reversed(numbered) for line in hues(run, number)]


def ensembles(run: Run) -> list[tuple[EnsembleTested, float]]:
    """With the epoch at which the last of the members ends."""
    ends = {stage.name: stage.begin + stage.epochs for stage in run.history.stages}
    return [(tested, max(ends.get(name, 0.0) for name in tested.members)) for tested in run.history.ensembles]


def hidden(runs: Sequence[Run]) -> float | None:
    """What lies below the axis of top-1, if anything: it begins a little below the least result of a stage, since the first tests
    of a training are far below all that is worth comparing."""
    stages = [stage for run in runs for stage in run.history.stages]
    ends = [100 * s.finished.top1 for s in stages if s.finished and s.finished.top1 is not None]
    tests = [100 * test.top1 for stage in stages for _, test in stage.tests]
    if not ends or not tests:
        return None
    low, high = min(ends), max(*ends, *tests)
    least = low - max(0.5, 0.12 * (high - low))
    return least if least > min(tests) else None


def points(runs: Sequence[Run]) -> tuple[list[dict[str, str]], list[list[object]]]:
    """Series, one for each stage of each run, and what can be pointed at: [series, iteration, epoch, top-1 in percent, loss,
    learning rate, what it is], None for what it doesn't have. Numbers are short."""
    series: list[dict[str, str]] = []
    found: list[list[object]] = []
    for number, run in enumerate(runs):
        for stage, hue, _ in hues(run, None if len(runs) == 1 else number):
            name = stage.name if len(runs) == 1 else f"{run.label}: {stage.name}"
            for bin in stage.trained.bins if stage.trained else ():
                what = "" if bin.updates == 1 else f"mean of {bin.updates} iterations"
                rate = _short(bin.rates[-1][1])
                found.append([len(series), bin.iter, _short(bin.epoch), None, _short(bin.loss), rate, what])
            for epoch, test in stage.tests:
                what = "validation" + (", averaged weights" if test.ema else "")
                top1 = float(f"{100 * test.top1:.2f}")
                found.append([len(series), test.iter, _short(epoch), top1, _short(test.loss), None, what])
            series.append({"name": name, "colour": f"var({variable(hue)})"})
        for tested, epoch in ensembles(run):
            loss = None if tested.loss is None else _short(tested.loss)
            name = f"ensemble {tested.name}" if len(runs) == 1 else f"{run.label}: ensemble {tested.name}"
            found.append([len(series), None, _short(epoch), float(f"{100 * tested.top1:.2f}"), loss, None, tested.rule])
            series.append({"name": name, "colour": f"var({variable(INK)})"})
    return series, found


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def caption(runs: Sequence[Run]) -> str:
    """How they were drawn."""
    bins = max((b.updates for run in runs for s in run.history.stages if s.trained for b in s.trained.bins), default=1)
    each = "every iteration" if bins == 1 else f"each point is the mean of {bins} iterations at most"
    longest = max(runs, key=lambda run: len(begun(run)))
    same = "; runs that have the same are drawn once" if len(runs) > 1 else ""
    found = [
        "Top-1 and validation loss: large dots at the end of a stage, small ones inside; hollow with averaged weights",
        f"Loss: the line is that of training, {each}; dots are validation",
        f"Learning rate: of as many iterations the first, the least, the largest and the last{same}",
        "Epochs count along the path of ancestors",
        "Images/s: over the time that processes were alive, what was done again among it",
    ]
    if (least := hidden(runs)) is not None:
        found.insert(1, f"Tests below {least:.1f} % are not shown")
    if any(run.history.ensembles for run in runs):
        found.insert(1, "Diamonds: ensembles, where the last of their members ends")
    if any(len(run.history.lives) > 1 for run in runs):
        found.append("Triangles: a resume")
    if any(set(extents(run)) - set(extents(longest)) for run in runs):
        found.append(f"The stages are marked as in {longest.label}")
    return ". ".join(found) + "."
