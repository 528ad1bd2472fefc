"""OUT/log.csv: a row for each displayed iteration and each evaluation, for spreadsheets and pandas.

`what` is `train`, `test`, or `ema_test` for the averaged weights. `epoch` counts along the path of ancestors. Of a `train` row the loss is
that of the iteration's batch, before the update, and the images per second are those of this iteration, as are the bytes that rank 0
sent for the gradients. Rows stand in the order of the schedule. Rows of iterations that a kill undid go when the stage starts again, and those up to a snapshot are on disk before it is.
"""

import csv
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from stagerun.base.events import Event, Iterated, SnapshotDue, SnapshotWritten, StageFinished, StageStarted, Tested
from stagerun.train.logs.course import Leg
from stagerun.train.logs.whole_file import WholeFile

HEADER = "stage,iter,epoch,what,lr,loss,images_per_s,top1,top5"
SENT = ",sent_bytes"  # a column that is there where a row says something in it: with several workers
TRAIN, TEST, EMA_TEST = KINDS = ("train", "test", "ema_test")
# Seconds between two writings where nothing else asks for one: each writes the whole file.
_EVERY_S = 10.0


class Key(NamedTuple):
    """What there is one row of."""

    stage: str
    iter: int
    what: str


def parse_key(line: str) -> Key | None:
    """None for a line that is not one of ours.

    >>> parse_key("init,20,0.5,train,0.1,2.3,800,,")
    Key(stage='init', iter=20, what='train')
    """
    try:
        stage, iter, _, what, *rest = next(csv.reader([line]))
        key = Key(stage, int(iter), what)
    except (ValueError, StopIteration, csv.Error):
        return None
    return key if len(rest) in (5, 6) and what in KINDS else None


class CsvLog:
    """A sink. `display` maps a stage to the iterations between two rows (0: evaluations alone)."""

    def __init__(
        self, path: Path, legs: Mapping[str, Leg], display: Mapping[str, int], warn: Callable[[str], None]
    ) -> None:
        self.legs, self.display = legs, display
        self.order = {stage: number for number, stage in enumerate(legs)}
        self.file = WholeFile(path, warn)
        lines = [line for line in self.file.lines if line not in (HEADER, HEADER + SENT)]
        wide = HEADER + SENT in self.file.lines[:1]
        # Each with that column, whether it was written or not.
        found = {key: line if wide else f"{line}," for line in lines if (key := parse_key(line)) is not None}
        self.file.left_out(sum(parse_key(line) is None for line in lines))
        self.rows = {key: line for key, line in found.items() if key.stage in legs}
        self._written = 0.0

    def __enter__(self) -> "CsvLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self.rows = {k: row for k, row in self.rows.items() if k.stage != event.stage or k.iter <= event.iter}
                self._write()
            case Iterated() if (every := self.display.get(event.stage, 0)) and event.iter % every == 0:
                speed, sent = event.images / event.seconds, event.sent_bytes or None
                self._add(Key(event.stage, event.iter, TRAIN), event.loss, speed, lr=event.lr, sent=sent)
                if time.monotonic() >= self._written + _EVERY_S:
                    self._write()
            case Tested():
                key = Key(event.stage, event.iter, EMA_TEST if event.ema else TEST)
                self._add(key, event.loss, event.images / event.seconds, top1=event.top1, top5=event.top5)
                self._write()
            case SnapshotDue() | SnapshotWritten() | StageFinished():
                self._write()

    def _add(
        self,
        key: Key,
        loss: float,
        images_per_s: float,
        lr: float | None = None,
        top1: float | None = None,
        top5: float | None = None,
        sent: int | None = None,
    ) -> None:
        epoch = f"{self.legs[key.stage].epoch(key.iter):.6f}".rstrip("0").rstrip(".")
        figures = ["" if figure is None else f"{figure:.9g}" for figure in (lr, loss, images_per_s, top1, top5)]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([key.stage, key.iter, epoch, key.what, *figures, sent])
        self.rows[key] = text.getvalue()

    def _write(self) -> None:
        self._written = time.monotonic()
        keys = sorted(self.rows, key=lambda k: (self.order[k.stage], k.iter, KINDS.index(k.what)))
        if keys or self.file.lines:
            lines = [self.rows[key] for key in keys]
            wide = any(not line.endswith(",") for line in lines)
            self.file.write([HEADER + SENT, *lines] if wide else [HEADER, *(line[:-1] for line in lines)])
