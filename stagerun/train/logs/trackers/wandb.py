"""Weights & Biases. A row of its history for each line, with the line's number as `_step`, so that its server keeps each one once; the charts of
a stage have `iteration` below them. Offline (WANDB_MODE=offline) the rows are in OUT/wandb, for `wandb sync`."""

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2

from stagerun.train.logs.trackers.tracker import Point, Text, TrackedRun

# A file of records: seven bytes, then blocks, each with pieces of records: checksum, size, kind, bytes.
_MAGIC, _BLOCK, _PIECE, _WHOLE, _LAST = 7, 1 << 15, "<IHB", 1, 4


class Wandb:
    def begin(self, run: TrackedRun) -> int:
        folder = Path(os.environ.get("WANDB_DIR") or run.out)
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project), id=run.id, name=run.name, dir=str(folder), resume="allow",
            config={**run.settings, "workers": run.workers}, settings=settings, reinit="finish_previous",
        )  # fmt: skip
        self.stages: set[str] = set()
        # The server's answer; what is on this disk alone, only the files say.
        return rows(folder / "wandb", run.id) if self.run.settings._offline else self.run.step

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            if point.stage not in self.stages:
                self.stages.add(point.stage)
                self.run.define_metric(f"{point.stage}/*", step_metric="iteration")
            self.run.log({**point.values, "iteration": point.iteration, "time": point.time}, step=point.number)
        for text in texts:
            self.run.summary[text.name] = text.text

    def end(self, status: str) -> None:
        self.run.summary["status"] = status
        self.run.finish(exit_code=int(status == "failed"))


def rows(folder: Path, run: str) -> int:
    """How many rows of a run the offline files hold, without a gap."""
    steps = {row.step.num for path in folder.glob(f"offline-run-*-{run}/run-{run}.wandb") for row in history(path)}
    return next(number for number in range(len(steps) + 1) if number not in steps)


def history(path: Path) -> Iterator[Any]:
    """The rows of one file, up to where a kill cut it short."""
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
        if record.WhichOneof("record_type") == "history":
            yield record.history


def _records(data: bytes) -> Iterator[bytes]:
    at, record = _MAGIC, b""
    header = struct.calcsize(_PIECE)
    while at + header <= len(data):
        if (left := _BLOCK - at % _BLOCK) < header:
            at += left
            continue
        _, size, kind = struct.unpack_from(_PIECE, data, at)
        at += header + size
        if not kind or at > len(data):
            return
        record += data[at - size : at]
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""
