"""Trackio. A row for each line, with the line's number as its step, and beside it `iteration`. On this disk (TRACKIO_DIR), or where
TRACKIO_SPACE_ID or TRACKIO_SERVER_URL say."""

from collections.abc import Sequence

import trackio

from stagerun.train.logs.trackers.tracker import Point, Text, TrackedRun


class Trackio:
    def begin(self, run: TrackedRun) -> int:
        self.run = trackio.init(
            project=run.project, name=run.name, resume="allow", config={**run.settings, "workers": run.workers},
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        return (
            self.run._next_step
        )  # 1 + the largest in its store, which it asks for; nothing else says it of a server's, too

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        for point in points:
            self.run.log({**point.values, "iteration": point.iteration}, step=point.number)
        for text in texts:
            if text.name in ("warning", "failed"):  # it has no word for a snapshot
                self.run.alert(title=text.name, text=text.text)

    def end(self, status: str) -> None:
        self.run.finish()
