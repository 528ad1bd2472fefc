"""The logs that `--log` names: those of this package, and trackers that other packages add."""

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from stagerun.base.errors import UsageError, listing

if TYPE_CHECKING:
    from stagerun.base.events import Event
    from stagerun.plan import Plan
    from stagerun.train.logs.trackers.tracker import Tracker


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
        lengths: dict[str, int] = {}
        for planned in self.plan.stages:
            stage = planned.stage
            if stage.enabled:
                lengths[stage.name] = stage.solver.max_iter
                start = 0
                if stage.parent:
                    left_at = lengths[stage.parent] if stage.parent_iter is None else stage.parent_iter
                    start = before[stage.parent] + left_at
                before[stage.name] = start
        for ensemble in schedule.ensembles:
            ends = [before[s] + (lengths[s] if iter is None else iter) for s, iter in ensemble.points if s in before]
            before[ensemble.name] = max(ends, default=0)
        return before


@dataclass(frozen=True, slots=True)
class Log:
    """`about`: what --help says of it."""

    make: Callable[[Opened], Sink]
    about: str
    package: str = ""  # that it can't do without; the extra of stagerun has the same name
    tracker: str = ""  # MODULE:CLASS; '' for what is no Tracker
    others: str = ""  # the package that an entry point is of


def _tensorboard(opened: Opened) -> Sink:
    from stagerun.train.logs.tensorboard import TensorBoard

    return TensorBoard(opened.out / "tensorboard", opened.places(), opened.warn)


def _tracker(name: str, opened: Opened) -> Sink:
    from stagerun.plan import State
    from stagerun.train.logs.trackers.follower import Orders
    from stagerun.train.logs.trackers.sink import Following

    plan = opened.plan
    to_train = [one for one in plan.stages if one.state in (State.FRESH, State.RESUME) and one.until is None]
    orders = Orders(
        tracker=name,
        project=plan.schedule.name,
        out=str(opened.out.absolute()),
        size=(opened.out / "log.jsonl").stat().st_size,
        goes_on={one.stage.name: one.iter for one in to_train},
        before=opened.places(),
        settings={
            stage.name: {field: _plain(value) for field, value in stage.identity.items()}
            for stage in plan.schedule.stages
        },
        workers=opened.workers,
    )
    return Following(orders, opened.warn, opened.patience)


def _plain(value: str) -> Any:
    """A number or a text, of what is written in a schedule."""
    try:
        return json.loads(value)
    except ValueError:
        return value


# A new log is a file beside this one and a row here.
LOGS = {
    "tensorboard": Log(
        _tensorboard, "OUT/tensorboard, a run for each stage; needs the package tensorboard.", package="tensorboard"
    ),
    "wandb": Log(
        partial(_tracker, "wandb"),
        "Weights & Biases; needs the package wandb.",
        package="wandb",
        tracker="stagerun.train.logs.trackers.wandb:Wandb",
    ),
}
GROUP = "stagerun.logs"
INSTEAD = {
    "csv": "`stagerun report OUT --by iteration --format csv` writes its rows",
    "dawnbench": "`stagerun report OUT --format dawnbench` writes it",
    "mllog": "`stagerun report OUT --by iteration --format csv` has its figures",
    "mlflow": f"a package adds it by an entry point in the group {GROUP} (`stagerun help trackers`)",
    "trackio": f"a package adds it by an entry point in the group {GROUP} (`stagerun help trackers`)",
}


class LogName(click.Choice):  # generic in a newer click alone
    """The type of `--log`."""

    def __init__(self) -> None:
        super().__init__(list(all_logs()))

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value in INSTEAD and value not in self.choices:
            self.fail(f"{value!r} was retired: {INSTEAD[value]}", param, ctx)
        return super().convert(value, param, ctx)


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
