"""The logs of a run that tools of others read, by the name that `--log` has for them, and what can be printed."""

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stagerun.base.errors import UsageError, listing
from stagerun.train.results import Before, before

if TYPE_CHECKING:
    from stagerun.base.events import EnsembleTested, Event, StageFinished
    from stagerun.base.recipe import Schedule
    from stagerun.plan import Plan
    from stagerun.train.logs.trackers.tracker import Tracker


class Sink(AbstractContextManager["Sink"], Protocol):
    def __call__(self, event: "Event") -> None: ...


class Screen(Sink, Protocol):
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """What a log is made from, once the output folder is held. `results`: those of stages finished before. `patience`: seconds that a log may
    take at the end of the run."""

    plan: "Plan"
    out: Path
    results: "Sequence[StageFinished]"
    warn: Callable[[str], None]
    workers: int = 1
    patience: float = 30.0


@dataclass(frozen=True, slots=True)
class Log:
    """`about`: what --help says of it."""

    make: Callable[[Opened], Sink]
    about: str
    package: str = ""  # that it can't do without; the extra of stagerun has the same name
    evaluations_only: bool = False
    tracker: str = ""  # MODULE:CLASS; '' for what is no Tracker
    others: str = ""  # the package that an entry point is of


def _tensorboard(opened: Opened) -> Sink:
    from stagerun.train.logs.course import course
    from stagerun.train.logs.tensorboard import TensorBoard

    return TensorBoard(opened.out / "tensorboard", course(opened.plan), opened.warn)


def _dawnbench(opened: Opened) -> Sink:
    from stagerun.train.logs.course import course
    from stagerun.train.logs.dawnbench import DawnBench

    images = {stage.name: stage.data.val[0].images for stage in opened.plan.schedule.stages if stage.data.val}
    return DawnBench(opened.out, course(opened.plan), images, opened.results, opened.warn)


def _mllog(opened: Opened) -> Sink:
    from stagerun.train.logs.course import course
    from stagerun.train.logs.mllog import MLLog

    return MLLog(opened.out / "mllog.txt", opened.plan.schedule, course(opened.plan), opened.warn)


def _csv(opened: Opened) -> Sink:
    from stagerun.train.logs.course import course
    from stagerun.train.logs.csv_log import CsvLog

    return CsvLog(opened.out / "log.csv", course(opened.plan), _display(opened.plan), opened.warn)


def _tracker(name: str, opened: Opened) -> Sink:
    from stagerun.plan import State
    from stagerun.train.logs.course import course
    from stagerun.train.logs.trackers.follower import Orders
    from stagerun.train.logs.trackers.sink import Following

    plan, legs = opened.plan, course(opened.plan)
    before = {stage: leg.iterations_before for stage, leg in legs.items()}
    for ensemble in plan.schedule.ensembles:
        places = [(legs[name], iter) for name, iter in ensemble.points if name in legs]
        ends = [leg.iterations_before + (leg.iterations if iter is None else iter) for leg, iter in places]
        before[ensemble.name] = max(ends, default=0)
    to_train = [one for one in plan.stages if one.state in (State.FRESH, State.RESUME) and one.until is None]
    orders = Orders(
        tracker=name,
        project=plan.schedule.name,
        out=str(opened.out.absolute()),
        size=(opened.out / "log.jsonl").stat().st_size,
        goes_on={one.stage.name: one.iter for one in to_train},
        before=before,
        settings={
            stage.name: {field: _plain(value) for field, value in stage.identity.items()}
            for stage in plan.schedule.stages
        },
        workers=opened.workers,
    )
    return Following(orders, opened.warn, opened.patience)


def send_rest(names: Sequence[str], opened: Opened) -> None:
    """What trackers lack of a run that is over."""
    from stagerun.train.logs.trackers.follower import lacks

    for name in dict.fromkeys(names):
        if all_logs()[name].tracker and lacks(opened.out, name):
            with all_logs()[name].make(opened):
                pass


def _plain(value: str) -> Any:
    """A number or a text, of what is written in a schedule."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def _of_tracker(name: str, package: str, kind: str, about: str) -> Log:
    where = f"stagerun.train.logs.trackers.{name}:{kind}"
    return Log(partial(_tracker, name), f"{about}; needs the package {package}.", package=package, tracker=where)


# A new log is a file beside this one and a row here.
LOGS = {
    "tensorboard": Log(
        _tensorboard, "OUT/tensorboard, a run for each stage; needs the package tensorboard.", package="tensorboard"
    ),
    "dawnbench": Log(
        _dawnbench,
        "OUT/dawnbench.tsv, in a tree a file for each of its ends, with a row for each evaluation of all images; its hours are those of "
        "training iterations alone, over all process lives.",
        evaluations_only=True,
    ),
    "mllog": Log(_mllog, "OUT/mllog.txt, MLPerf's :::MLLOG lines; their clock is the wall's."),
    "csv": Log(_csv, "OUT/log.csv, a row for each displayed iteration (`display`) and each evaluation."),
    "wandb": _of_tracker("wandb", "wandb", "Wandb", "Weights & Biases"),
    "mlflow": _of_tracker("mlflow", "mlflow", "MLflow", "MLflow, at MLFLOW_TRACKING_URI or in OUT/mlflow.db"),
    "trackio": _of_tracker("trackio", "trackio", "Trackio", "Trackio"),
}
GROUP = "stagerun.logs"


@cache
def all_logs() -> dict[str, Log]:
    """LOGS, and what other packages add. A name of ours stays ours."""
    found = {
        entry.name: Log(
            partial(_tracker, entry.name),
            f"of the package {entry.dist.name if entry.dist else '?'}.",
            tracker=entry.value,
            others=entry.dist.name if entry.dist else "?",
        )
        for entry in importlib.metadata.entry_points(group=GROUP)
    }
    return found | LOGS


def tracker_of(name: str) -> "Callable[[], Tracker]":
    """Whatever its package raises."""
    return importlib.metadata.EntryPoint(name, all_logs()[name].tracker, GROUP).load()


def require_packages(names: Sequence[str]) -> None:
    """UsageError for a log whose package isn't installed or can't be imported, before anything is started."""
    for name in names:
        log = all_logs()[name]
        if log.package and importlib.util.find_spec(log.package) is None:
            raise UsageError(
                f"`--log {name}` needs the package {log.package}", f"pip install 'stagerun[{log.package}]'"
            )
        if log.others:
            try:
                tracker_of(name)
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"`--log {name}`: {log.tracker} of the package {log.others} can't be imported: {type(error).__name__}: {error}",
                    f"mend or uninstall {log.others}; stagerun itself has {listing(list(LOGS), 'and')}",
                ) from error


def require_evaluation(names: Sequence[str], schedule: "Schedule") -> None:
    """UsageError for a log that would stay empty, since the schedule evaluates nothing."""
    for name in names:
        if all_logs()[name].evaluations_only and not schedule.validation_sets:
            raise UsageError(
                f"`--log {name}` is a table of evaluations, and without `data.val` nothing is evaluated",
                f"add `val {{ ... }}` to `data`, or leave `--log {name}` out",
            )


# -- what is printed


def _text(plan: "Plan", out: Path, results: "Sequence[StageFinished]", ensembles: "Sequence[EnsembleTested]") -> Screen:
    from stagerun.train.hours import TimeLeft
    from stagerun.train.logs.console import Console

    return Console(_display(plan), parents(plan, out), results, ensembles=ensembles, time_left=TimeLeft(plan, out))


def _caffe(
    plan: "Plan", out: Path, results: "Sequence[StageFinished]", ensembles: "Sequence[EnsembleTested]"
) -> Screen:
    from stagerun.train.logs.caffe_log import CaffeLog
    from stagerun.train.logs.course import course

    return CaffeLog(course(plan), _display(plan), parents(plan, out), results, ensembles)


def _display(plan: "Plan") -> dict[str, int]:
    return {stage.name: stage.solver.display for stage in plan.schedule.stages}


def parents(plan: "Plan", out: Path) -> "dict[str, Before]":
    """What each stage is compared with: the stage at whose end it starts, or the average. Of one that is kept, the name may stand for
    something else by now: then top-1 of what it started from."""
    return {planned.stage.name: before(plan, out, planned) for planned in plan.stages}


SCREENS: dict[str, Callable[["Plan", Path, "Sequence[StageFinished]", "Sequence[EnsembleTested]"], Screen]] = {
    "text": _text,
    "caffe": _caffe,
}


def in_format(log_format: str, text: str) -> str:
    """What `run` says before there are events, as the screen of that name would say it."""
    if log_format == "text":
        return text
    from stagerun.train.logs.caffe_log import glog

    return glog(text)
