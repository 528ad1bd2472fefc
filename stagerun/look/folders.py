"""The folders that a page is about, a schedule's and runs', read again when they have changed. Changes nothing."""

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import Problem, StagerunError, UsageError
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.logs.log_file import LOG
from stagerun.look.history import Reader
from stagerun.look.picture import Picture, make_picture
from stagerun.look.runs import Run, labels, run_of, stored_schedule
from stagerun.plan import Plan, make_plan
from stagerun.tools.forecast import hours_blocks, notes
from stagerun.tools.lint import lint
from stagerun.tools.output import Target, plan_of
from stagerun.tools.status import Status, look

MOST_POINTS = 1200  # of all curves

# Path, time of change, size and inode of each file that exists.
Stamp = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """A schedule without mistakes, and what `plan` prints: `blocks` below its table. `stored`: it was read from a snapshot, which doesn't
    say where settings were written."""

    plan: Plan
    picture: Picture
    findings: Sequence[Problem] = ()
    notes: Sequence[str] = ()
    blocks: Sequence[str] = ()
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """An output folder as of `stamp`. `run`: None before anything is logged. `error`: why it can't be read."""

    out: Path
    label: str
    reader: Reader
    stamp: Stamp = ()
    status: Status | None = None
    run: Run | None = None
    error: str = ""

    @property
    def changed(self) -> bool:
        """Return whether it has changed, or may have."""
        return (self.run is not None and self.run.alive) or stamp(_watched(self.out)) != self.stamp


@dataclass(slots=True)
class Folders:
    """The result of the last `read`: `planned` is the last version of the schedule without mistakes, `error` the mistakes of the present
    version, `outputs` the contents of the output folders."""

    folder: str
    outs: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    planned: Planned | None = None
    error: StagerunError | None = None
    outputs: tuple[Output, ...] = ()
    _stamps: tuple[Stamp, Stamp] | None = field(default=None, init=False)

    @property
    def title(self) -> str:
        return self.planned.picture.name if self.planned is not None else self.folder or "runs"

    def edited(self) -> bool:
        """Return whether a file of the schedule has changed since the last `read`."""
        return self._stamps is not None and stamp(self._sources()) != self._stamps[0]

    def moved(self) -> bool:
        """Return whether an output folder has changed, or may have."""
        return any(one.changed for one in self.outputs)

    def read(self) -> None:
        """Read everything that has changed."""
        stamps = stamp(self._sources()), stamp(out / name for out in self._outs() for name in ("snapshots", "results"))
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self.planned, self.error = self._read_schedule() if self.folder else self._read_snapshot(), None
            except StagerunError as error:
                self.error = error
        outs, last = self._outs(), {one.out: one for one in self.outputs}
        points = max(100, MOST_POINTS // max(1, len(outs)))
        outputs = []
        for out, label in zip(outs, labels([str(out) for out in outs]), strict=True):
            one = last.get(out) or Output(out, label, Reader(out, points))
            outputs.append(self._read_output(one) if one.changed or out not in last else one)
        self.outputs = tuple(outputs)

    def _outs(self) -> tuple[Path, ...]:
        if self.outs or self.planned is None:
            return self.outs
        return (output_folder(self.planned.plan.schedule.name, None),)

    def _sources(self) -> list[Path]:
        """Return the folder, its solver files, and the other files that the last version was read from."""
        if not self.folder:
            return []
        folder, files = Path(self.folder), self.planned.plan.schedule.files if self.planned else ()
        return [folder, *sorted({*folder.glob("*.prototxt"), *(Path(path) for path, _ in files)})]

    def _read_schedule(self) -> Planned:
        schedule = load(self.folder, self.overrides)
        out = self.outs[0] if self.outs else output_folder(schedule.name, None)
        plan = plan_of(schedule, out)
        blocks, _ = hours_blocks(plan, out, None, None)
        return Planned(plan, make_picture(schedule), lint(schedule), tuple(notes(plan, out)), blocks)

    def _read_snapshot(self) -> Planned | None:
        if (schedule := stored_schedule(self.outs)) is None:
            return None
        return Planned(make_plan(schedule, store.Inventory()), make_picture(schedule), stored=True)

    def _read_output(self, output: Output) -> Output:
        schedule = self.planned.plan.schedule if self.planned and self.folder and len(self._outs()) == 1 else None
        now = replace(output, stamp=stamp(_watched(output.out)), error="")
        try:
            status = look(Target(output.out, schedule), time.time())
            if not os.path.exists(output.out / LOG):
                return replace(now, status=status)
            run = run_of(output.out, output.label, output.reader.read(), status, lambda _: None)
            return replace(now, status=status, run=run)
        except StagerunError as error:
            return replace(now, error=error.message)


def find_folders(paths: Sequence[str], overrides: Sequence[str] = ()) -> Folders:
    """UsageError for a path that is neither a schedule's folder nor an output folder, and for two schedules."""
    folders = [path for path in paths if os.path.exists(os.path.join(path, SCHEDULE_FILE))]
    outs = [Path(path) for path in paths if path not in folders]
    for out in outs:
        if not (os.path.isdir(out / "snapshots") or os.path.exists(out / LOG)):
            raise UsageError(
                f"{out} is neither a schedule's folder ({SCHEDULE_FILE}) nor an output folder (snapshots, {LOG})",
                "name the folder that `stagerun run` reads, or its output folder",
            )
    if len(folders) > 1:
        raise UsageError("two schedules are named, and a page shows one", "`stagerun diff` compares two")
    if overrides and not folders:
        raise UsageError("--set is for a schedule's folder, and only output folders are named", "leave it out")
    return Folders("".join(folders), tuple(outs), tuple(overrides))


def stamp(paths: Iterable[Path]) -> Stamp:
    """Two stamps are equal if nothing has changed."""
    stamps = []
    for path in paths:
        with suppress(OSError, ValueError):
            stat = os.stat(path)
            stamps.append((str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(stamps)


def _watched(out: Path) -> list[Path]:
    return [out, *(out / name for name in (LOG, "snapshots", "results"))]
