"""OUT/dawnbench.tsv: epoch, hours of training and accuracy of each evaluation on all images, in DAWNBench's form.

The clock is cifar10-fast's: the time of the training iterations, with reading and augmenting their images, from the seed on
along the path of ancestors and over all process lives. Evaluations, snapshots, starts, and the time between two lives are
not in it; iterations that a kill undid and that were trained again count once. Others publish hours with evaluations in them.

An evaluation on a part of the images (`test_iter`) has no row. The rows of a chain of stages stand in one file. In a tree each
stage at whose end no other starts has a file, dawnbench-STAGE.tsv, with the rows from the seed to it. Of a stage that is left in
its midst a branch has the rows up to there, and of its hours the share of its iterations. The averaged weights
of a stage with `ema_decay` have files of their own, named .ema.tsv.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.base.events import Event, Iterated, StageFinished, StageStarted, Tested
from stagerun.train.logs.course import Leg, ends
from stagerun.train.logs.whole_file import WholeFile

HEADER = "epoch\thours\ttop1Accuracy\ttop5Accuracy"


@dataclass(frozen=True, slots=True)
class Row:
    """One evaluation. `epoch` is rounded as it is written, so that a row read back is equal."""

    epoch: float
    hours: float
    top1: float  # 0..1
    top5: float

    def __str__(self) -> str:
        epoch = f"{self.epoch:.6f}".rstrip("0").rstrip(".")
        return f"{epoch}\t{self.hours:.8f}\t{100 * self.top1:.2f}\t{100 * self.top5:.2f}"


def parse_row(line: str) -> Row | None:
    """None for a line that is not one of ours.

    >>> parse_row("24.5\\t0.31472000\\t75.81\\t93.01").epoch
    24.5
    """
    try:
        epoch, hours, top1, top5 = map(float, line.split("\t"))
    except ValueError:
        return None
    row = Row(epoch, hours, top1 / 100, top5 / 100)
    return row if str(row) == line else None


class _Table:
    """One file. `path`: its stages, from the seed on, with the iterations that belong to it."""

    def __init__(self, file: WholeFile, path: dict[str, int]) -> None:
        self.file, self.path = file, path
        found = [parse_row(line) for line in file.lines if line != HEADER]
        self.rows = [row for row in found if row is not None]
        file.left_out(len(found) - len(self.rows))

    def cut(self, epoch: float) -> None:
        """Forgets what came after an epoch that training goes on from."""
        self.rows = [row for row in self.rows if row.epoch <= epoch]

    def add(self, row: Row) -> None:
        """In the place of a row of the same epoch, if there is one."""
        others = [other for other in self.rows if other.epoch != row.epoch]
        self.rows = sorted([*others, row], key=lambda row: row.epoch)

    def write(self) -> None:
        if self.rows or self.file.lines:
            self.file.write([HEADER, *map(str, self.rows)])


class DawnBench:
    """A sink. `val_images`: those of an evaluation of all, by stage; `results` are those of stages finished before, from which rows
    are made that the file doesn't have."""

    def __init__(
        self,
        out: Path,
        legs: dict[str, Leg],
        val_images: dict[str, int],
        results: Sequence[StageFinished],
        warn: Callable[[str], None],
    ) -> None:
        self.legs, self.val_images = legs, val_images
        last = ends(legs)

        def tables(suffix: str) -> list[_Table]:
            names = {end: f"dawnbench-{end}" if len(last) > 1 else "dawnbench" for end in last}
            return [_Table(WholeFile(out / (names[end] + suffix), warn), dict(legs[end].steps)) for end in last]

        self.tables = {False: tables(".tsv"), True: tables(".ema.tsv")}
        self.results = {result.stage: result for result in results}
        self.seconds = {result.stage: result.train_seconds for result in results}  # trained, by stage
        self._add_results()

    def __enter__(self) -> "DawnBench":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self.results.pop(event.stage, None)
                self.seconds[event.stage] = event.train_seconds
                self._cut(event.stage, event.iter)
            case Iterated():
                self.seconds[event.stage] += event.seconds
            # The evaluation at the stage's end is in StageFinished too.
            case Tested() if self._is_whole(event) and event.iter != self.legs[event.stage].iterations:
                self._add(event.stage, event.iter, event.top1, event.top5, event.ema)
            case StageFinished():
                self.results[event.stage] = event
                self.seconds[event.stage] = event.train_seconds
                self._add_results()

    def _is_whole(self, event: Tested) -> bool:
        return event.images == self.val_images.get(event.stage)

    def _add_results(self) -> None:
        for result in self.results.values():
            if not self.seconds.keys() >= {stage for stage, _ in self.legs[result.stage].steps}:
                continue  # an ancestor's result was lost: it is evaluated again before anything else
            if result.top1 is not None and result.top5 is not None:
                self._add(result.stage, result.iterations, result.top1, result.top5, False)
            if result.ema_top1 is not None and result.ema_top5 is not None:
                self._add(result.stage, result.iterations, result.ema_top1, result.ema_top5, True)

    def _cut(self, stage: str, iter: int) -> None:
        for table in [*self.tables[False], *self.tables[True]]:
            if iter < table.path.get(stage, 0):
                table.cut(_epoch(self.legs[stage], iter))
                table.write()

    def _add(self, stage: str, iter: int, top1: float, top5: float, ema: bool) -> None:
        leg = self.legs[stage]
        above = (self.seconds[s] * length / self.legs[s].iterations for s, length in leg.steps[:-1])
        row = Row(_epoch(leg, iter), (sum(above) + self.seconds[stage]) / 3600, top1, top5)
        for table in self.tables[ema]:
            if iter <= table.path.get(stage, 0):
                table.add(row)
                table.write()


def _epoch(leg: Leg, iter: int) -> float:
    return round(leg.epoch(iter), 6)
