"""The logs of `--log`: TensorBoard, wandb, and trackers of other packages."""

import errno
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from stagerun.base.errors import UsageError, listing
from stagerun.base.events import EnsembleTested, Event, Iterated, StageStarted, Tested, TestedBeside
from stagerun.logs.tracker import figures_of
from stagerun.system.files import writing
from stagerun.system.host import host_name

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
    """The input of a log, once the output folder is held. `patience`: seconds that a log may take at the end of the run."""

    plan: "Plan"
    out: Path
    warn: Callable[[str], None]
    workers: int = 1
    patience: float = 30.0

    def iterations_before(self) -> dict[str, int]:
        """Return the iterations before each stage along its path from the seed, and up to the end of each ensemble's last member."""
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
        return before | {name: max(members, default=0) for name, members in ends.items()}


@dataclass(frozen=True, slots=True)
class Format:
    """`about`: for --help. `tracker`: MODULE:CLASS of a tracker, '' for TensorBoard. `package`: a required package, and the extra of
    stagerun. `others`: the package of an entry point."""

    name: str
    about: str
    tracker: str = ""
    package: str = ""
    others: str = ""

    def make(self, opened: Opened) -> Sink:
        if self.tracker:
            from stagerun.logs.follower import Following

            return Following(self.name, opened)

        return TensorBoard(opened.out / "tensorboard", opened.iterations_before(), opened.warn)


# A new log is a class and a row here; without a tracker, also a case in `Format.make`.
LOGS = (
    Format(
        "tensorboard", "OUT/tensorboard, a run for each stage; needs the package tensorboard.", package="tensorboard"
    ),
    Format("wandb", "Weights & Biases; needs the package wandb.", "stagerun.logs.tracker:Wandb", package="wandb"),
)
GROUP = "stagerun.logs"


class LogName(click.Choice):  # generic in a newer click alone
    """The type of `--log`."""

    def __init__(self) -> None:
        super().__init__(list(all_logs()))


@cache
def all_logs() -> dict[str, Format]:
    """Return LOGS and the logs of other packages, which can't replace LOGS."""
    logs = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else "?"
        logs[entry.name] = Format(entry.name, f"of the package {package}.", entry.value, others=package)
    return logs | {log.name: log for log in LOGS}


def tracker_of(name: str) -> "Callable[[], Tracker]":
    """Import a tracker's class. Raises any error of its package."""
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
                    f"repair or uninstall {log.others}; stagerun has {listing([log.name for log in LOGS], 'and')}",
                ) from error


def _protos() -> tuple[Any, Any]:
    """Return TensorBoard's messages, and the writer of records with checksums. UsageError without the package."""
    try:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError as error:
        raise UsageError(
            f"`--log tensorboard` needs the package tensorboard, which can't be imported: {error}",
            "pip install 'stagerun[tensorboard]'",
        ) from error
    return event_pb2, RecordWriter


class _EventFile:
    """A new file of one stage or ensemble. Whole records only, so that a full disk or a kill harms no earlier one.

    Its name sorts after earlier lives': TensorBoard reads files in this order. OSError.
    """

    def __init__(self, folder: Path, purge_from: int | None) -> None:
        self.protos, record_writer = _protos()
        folder.mkdir(parents=True, exist_ok=True)
        names = [name.split(".") for name in os.listdir(folder) if name.startswith("events.out.tfevents.")]
        second = max([int(time.time()), *(int(words[3]) + 1 for words in names if words[3].isdigit())])
        self.path = folder / f"events.out.tfevents.{second:010d}.{host_name()}.{os.getpid()}.0"
        self.file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by TensorBoard.__exit__
        self.size = 0
        self.records = record_writer(self)
        try:
            self.add(file_version="brain.Event:2")
            if purge_from is not None:
                self.add(step=purge_from, session_log={"status": self.protos.SessionLog.START})
        except OSError:
            self.file.close()
            with suppress(OSError):
                self.path.unlink()
            raise

    def add(self, **fields: Any) -> None:
        self.records.write(self.protos.Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, record: bytes) -> None:
        """Write one whole record, for the RecordWriter."""
        if self.file.write(record) == len(record):
            self.size += len(record)
            return
        # A full disk takes a part of the record, behind which nothing could be read.
        self.file.truncate(self.size)
        self.file.seek(self.size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class TensorBoard:
    """OUT/tensorboard for TensorBoard: a sink, for rank 0, without TensorFlow and without torch's writer.

    Each stage is a run, OUT/tensorboard/STAGE, whose steps count the iterations along the path of its ancestors. Tags: train/loss, lr,
    momentum, weight_decay, epoch and images_per_second per iteration, with several workers also train/sent_bytes; test/top1, top5 (0 to 1),
    loss and, with several labels, mean_ap per evaluation; test_ema/... for averaged weights. An ensemble is a run with one point of test/...
    at the end of its last member. Each process life appends a file that opens with TensorBoard's mark of a restart, which drops the points
    that a kill undid.

    `before`: `Opened.iterations_before`. The first failure to write is a warning; later events are still tried. UsageError without the
    package; PermissionDenied, StorageError if `folder` can't be made.
    """

    def __init__(self, folder: Path, before: Mapping[str, int], warn: Callable[[str], None]) -> None:
        _protos()
        self.folder, self.before, self.warn, self._warned = folder, before, warn, False
        self.files: dict[str, _EventFile] = {}
        self.restarts: dict[str, int] = {}
        with writing(folder, "check the disk, or give another output folder with --out"):
            folder.mkdir(exist_ok=True)

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.file.close()

    def __call__(self, event: Event) -> None:
        match event:
            case StageStarted():
                self._restart(event.stage, self.before[event.stage] + event.iter + 1)
            case Iterated():
                sent = {"sent_bytes": float(event.sent_bytes)} if event.sent_bytes else {}
                self._write(event.stage, event.iter, "train", figures_of(event) | sent)
            case Tested() | TestedBeside():
                group = "test_ema" if event.ema else "test"
                group += f"_{event.val}" if isinstance(event, TestedBeside) else ""
                self._write(event.stage, event.iter, group, figures_of(event))
            case EnsembleTested():
                self._restart(event.name, 0)  # drop an earlier evaluation
                self._write(event.name, 0, "test", figures_of(event))

    def _restart(self, run: str, step: int) -> None:
        """Void the points of earlier lives from `step` on, by a new file."""
        if run in self.files:
            self.files.pop(run).file.close()
        self.restarts[run] = step

    def _write(self, run: str, iter: int, group: str, values: Mapping[str, float]) -> None:
        try:
            if run not in self.files:
                self.files[run] = _EventFile(self.folder / run, self.restarts.get(run))
            tagged = [{"tag": f"{group}/{name}", "simple_value": value} for name, value in values.items()]
            self.files[run].add(step=self.before[run] + iter, summary={"value": tagged})
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = error.strerror or str(error)
                self.warn(f"warning: {self.folder} can't be written: {why}; training continues without its new points")
