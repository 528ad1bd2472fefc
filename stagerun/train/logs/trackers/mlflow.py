"""MLflow. One run, and in it metrics with the stage's name before theirs. Nested runs, one for each stage, would be several that a kill can leave
half made; and a chain's curves would not lie in one chart. Into MLFLOW_TRACKING_URI, or OUT/mlflow.db."""

import os
import re
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from stagerun.train.logs.trackers.tracker import Point, Text, TrackedRun

_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_ID = "stagerun.id"
_METRICS, _PARAMS, _LONGEST = 1000, 100, 6000  # of one request; of a value
_STATUS = {"finished": "FINISHED", "failed": "FAILED"}


class MLflow:
    def begin(self, run: TrackedRun) -> None:
        """It has no word for how much is there. So `send` looks, the first time, and leaves out what is."""
        self.client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.out.absolute()}/mlflow.db")
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", run.project)
        known = self.client.get_experiment_by_name(experiment)
        self.experiment = known.experiment_id if known else self.client.create_experiment(experiment)
        found = self.client.search_runs([self.experiment], f"tags.`{_ID}` = '{run.id}'")
        self.known: dict[str, set[tuple[int, int]]] | None = {}
        if found:
            self.run = found[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
            return
        self.run = self.client.create_run(self.experiment, tags={_ID: run.id}, run_name=run.name).info.run_id
        params = {"workers": run.workers}
        params |= {f"{stage}/{name}": value for stage, all in run.settings.items() for name, value in all.items()}
        named = [Param(_NOT_IN_NAMES.sub("_", name), str(value)[:_LONGEST]) for name, value in params.items()]
        for first in range(0, len(named), _PARAMS):
            self.client.log_batch(self.run, params=named[first : first + _PARAMS])

    def send(self, points: Sequence[Point], texts: Sequence[Text]) -> None:
        metrics = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, int(point.time * 1000), point.iteration)
            for point in points
            for name, value in point.values.items()
        ]
        if self.known is not None and metrics:
            missing = [metric for metric in metrics if not self._has(metric)]
            self.known = None if missing == metrics else self.known  # they come in order
            metrics = missing
        tags = [RunTag(_NOT_IN_NAMES.sub("_", text.name), text.text[:_LONGEST]) for text in texts]
        for first in range(0, len(metrics), _METRICS):
            self.client.log_batch(self.run, metrics=metrics[first : first + _METRICS])
        self.client.log_batch(self.run, tags=tags)

    def _has(self, metric: Metric) -> bool:
        assert self.known is not None
        if metric.key not in self.known:
            history = self.client.get_metric_history(self.run, metric.key)
            self.known[metric.key] = {(one.step, one.timestamp) for one in history}
        return (metric.step, metric.timestamp) in self.known[metric.key]

    def end(self, status: str) -> None:
        self.client.set_terminated(self.run, _STATUS.get(status, "KILLED"))
