"""The logs of a run that tools of others read, by the name that `--log` has for them, and what can be printed."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stagerun.base.errors import UsageError

if TYPE_CHECKING:
    from stagerun.base.events import EnsembleTested, Event, StageFinished
    from stagerun.base.recipe import Schedule
    from stagerun.plan import Plan


class Sink(AbstractContextManager["Sink"], Protocol):
    def __call__(self, event: "Event") -> None: ...


class Screen(Sink, Protocol):
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """What a log is made from, once the output folder is held. `results`: those of stages finished before."""

    plan: "Plan"
    out: Path
    results: "Sequence[StageFinished]"
    warn: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Log:
    """`about`: what --help says of it."""

    make: Callable[[Opened], Sink]
    about: str
    package: str = ""  # that it can't do without; the extra of stagerun has the same name
    evaluations_only: bool = False


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
}


def require_packages(names: Sequence[str]) -> None:
    """UsageError for a log whose package isn't installed, before anything is started."""
    for name in names:
        package = LOGS[name].package
        if package and importlib.util.find_spec(package) is None:
            raise UsageError(f"`--log {name}` needs the package {package}", f"pip install 'stagerun[{package}]'")


def require_evaluation(names: Sequence[str], schedule: "Schedule") -> None:
    """UsageError for a log that would stay empty, since the schedule evaluates nothing."""
    for name in names:
        if LOGS[name].evaluations_only and not schedule.validation_sets:
            raise UsageError(
                f"`--log {name}` is a table of evaluations, and without `data.val` nothing is evaluated",
                f"add `val {{ ... }}` to `data`, or leave `--log {name}` out",
            )


# -- what is printed


def _text(plan: "Plan", results: "Sequence[StageFinished]", ensembles: "Sequence[EnsembleTested]") -> Screen:
    from stagerun.train.logs.console import Console

    return Console(_display(plan), parents(plan), results, ensembles=ensembles)


def _caffe(plan: "Plan", results: "Sequence[StageFinished]", ensembles: "Sequence[EnsembleTested]") -> Screen:
    from stagerun.train.logs.caffe_log import CaffeLog
    from stagerun.train.logs.course import course

    return CaffeLog(course(plan), _display(plan), parents(plan), results, ensembles)


def _display(plan: "Plan") -> dict[str, int]:
    return {stage.name: stage.solver.display for stage in plan.schedule.stages}


def parents(plan: "Plan") -> dict[str, str | None]:
    """The stages at whose ends others start: with those they are compared."""
    return {stage.name: stage.parent if stage.parent_iter is None else None for stage in plan.schedule.stages}


SCREENS: dict[str, Callable[["Plan", "Sequence[StageFinished]", "Sequence[EnsembleTested]"], Screen]] = {
    "text": _text,
    "caffe": _caffe,
}


def in_format(log_format: str, text: str) -> str:
    """What `run` says before there are events, as the screen of that name would say it."""
    if log_format == "text":
        return text
    from stagerun.train.logs.caffe_log import glog

    return glog(text)
