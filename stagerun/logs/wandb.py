"""Weights & Biases. A row of its history for each line, with the line's number as `_step`, so that its server keeps each one once; the charts of
a stage have `iteration` below them. Offline (WANDB_MODE=offline) the rows are in OUT/wandb, for `wandb sync`."""

import os
from collections.abc import Sequence

import wandb

from stagerun.logs.tracker import Point, Text, TrackedRun


class Wandb:
    def begin(self, run: TrackedRun) -> int | None:
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project), id=run.id, name=run.name, dir=os.environ.get("WANDB_DIR") or str(run.out), resume="allow",
            config={**run.settings, "workers": run.workers}, settings=settings, reinit="finish_previous",
        )  # fmt: skip
        self.stages: set[str] = set()
        # The server's answer. Offline none is there: then a row may stand in two files, and the server they are synced to keeps one.
        return None if self.run.settings._offline else self.run.step

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
