"""The logs that `--log` names: those of this package, and trackers that other packages add."""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from stagerun.base.errors import UsageError, listing

if TYPE_CHECKING:
    from stagerun.base.events import Event
    from stagerun.logs.tracker import Tracker
    from stagerun.plan import Plan


class Sink(AbstractContextManager["Sink"], Protocol):
    def __call__(self, event: "Event") -> None: ...


class Screen(Sink, Protocol):
    def say(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """What a log is made from, once the output folder is held. `patience`: seconds that a log may take at the end of the run."""

    plan: "Plan"
    out: Path
    warn: Callable[[str], None]
    workers: int = 1
    patience: float = 30.0

    def places(self) -> dict[str, int]:
        """By stage the iterations before it, along its path from the seed; by ensemble those up to where the last of its members ends."""
        schedule = self.plan.schedule
        before: dict[str, int] = {}
        lengths = {stage.name: stage.solver.max_iter for stage in schedule.stages}

        def end(stage: str, iter: int | None) -> int:
            return before[stage] + (lengths[stage] if iter is None else iter)

        for planned in self.plan.stages:
            stage = planned.stage
            if stage.enabled:
                before[stage.name] = end(stage.parent, stage.parent_iter) if stage.parent else 0
        ends = {e.name: [end(*point) for point in e.points if point[0] in before] for e in schedule.ensembles}
        return before | {name: max(found, default=0) for name, found in ends.items()}


@dataclass(frozen=True, slots=True)
class Format:
    """`about`: what --help says of it. `tracker`: MODULE:CLASS of a tracker, '' for a log of another kind. `package`: what it can't do
    without; the extra of stagerun has the same name. `others`: the package that an entry point is of."""

    name: str
    about: str
    tracker: str = ""
    package: str = ""
    others: str = ""

    def make(self, opened: Opened) -> Sink:
        if self.tracker:
            from stagerun.logs.follower import Following

            return Following(self.name, opened)
        from stagerun.logs.tensorboard import TensorBoard

        return TensorBoard(opened.out / "tensorboard", opened.places(), opened.warn)


# A new log is a file beside this one and a row here; one that is no tracker, a case in `Format.make` as well.
LOGS = (
    Format(
        "tensorboard", "OUT/tensorboard, a run for each stage; needs the package tensorboard.", package="tensorboard"
    ),
    Format("wandb", "Weights & Biases; needs the package wandb.", "stagerun.logs.wandb:Wandb", package="wandb"),
)
GROUP = "stagerun.logs"
_BY_ENTRY_POINT = f"a package adds it by an entry point in the group {GROUP} (`stagerun help trackers`)"
_INSTEAD = {
    "csv": "`stagerun report OUT --by iteration --format csv` writes its rows",
    "dawnbench": "`stagerun report OUT --format dawnbench` writes it",
    "mllog": "`stagerun report OUT --by iteration --format csv` has its figures",
    "mlflow": _BY_ENTRY_POINT,
    "trackio": _BY_ENTRY_POINT,
}


class LogName(click.Choice):  # generic in a newer click alone
    """The type of `--log`."""

    def __init__(self) -> None:
        super().__init__(list(all_logs()))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in _INSTEAD and value not in self.choices:
            self.fail(f"{value!r} was retired: {_INSTEAD[value]}", param, ctx)
        return super().convert(value, param, ctx)


@cache
def all_logs() -> dict[str, Format]:
    """LOGS, and what other packages add. A name of ours stays ours."""
    found = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else "?"
        found[entry.name] = Format(entry.name, f"of the package {package}.", entry.value, others=package)
    return found | {log.name: log for log in LOGS}


def tracker_of(name: str) -> "Callable[[], Tracker]":
    """Whatever its package raises."""
    return importlib.metadata.EntryPoint(name, all_logs()[name].tracker, GROUP).load()


def require_packages(names: Sequence[str]) -> None:
    """UsageError for a log whose package isn't installed or can't be imported, before anything is started."""
    for log in (all_logs()[name] for name in names):
        if log.package and importlib.util.find_spec(log.package) is None:
            raise UsageError(
                f"`--log {log.name}` needs the package {log.package}", f"pip install 'stagerun[{log.package}]'"
            )
        if log.others:
            try:
                tracker_of(log.name)
            except (Exception, SystemExit) as error:
                raise UsageError(
                    f"`--log {log.name}`: {log.tracker} of the package {log.others} can't be imported: {type(error).__name__}: {error}",
                    f"mend or uninstall {log.others}; stagerun itself has {listing([log.name for log in LOGS], 'and')}",
                ) from error
