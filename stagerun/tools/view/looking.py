"""What the page is about: schedules' folders and output folders, read again when they have changed. Changes nothing."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import StagerunError, UsageError
from stagerun.base.snapshots import Inventory
from stagerun.command.shared import output_folder
from stagerun.drawing.picture import make_picture
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.plan import make_plan
from stagerun.plan.budget import render_budget
from stagerun.plan.ensembles import ensembles_left, ensembles_text
from stagerun.store.given import looked_at
from stagerun.store.layout import results_folder, snapshots_folder
from stagerun.tools.diff.command import compare, overlay
from stagerun.tools.lint import lint, problems
from stagerun.tools.plan.command import choices_remark, remarks, results_remark
from stagerun.tools.plan.plot import look_at
from stagerun.tools.report.look import labels, require_different, run_of, word_of
from stagerun.tools.view.before import Before
from stagerun.tools.view.during import Seen
from stagerun.tools.view.follow import Follower
from stagerun.train.hours import find_budget, find_hours
from stagerun.train.output import DISK, LOG, Target, newest_recipe, plan_of
from stagerun.train.results import planned_ensembles
from stagerun.train.status import look

Sign = tuple[
    tuple[str, int, int, int], ...
]  # a file's name, time of change, size and number; equal as long as nothing has changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`folders` hold a schedule: none, one, or two that are compared. `outs` are output folders; none for that which one schedule has
    by default."""

    folders: tuple[str, ...]
    outs: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    images_per_second: float | None = None
    allocation: float | None = None


def asked(paths: Sequence[str], **options: object) -> Asked:
    """UsageError for a folder that is neither, or too many schedules."""
    folders = tuple(path for path in paths if _is_schedule(path))
    outs = tuple(path for path in paths if path not in folders)
    for path in outs:
        if not (os.path.isdir(os.path.join(path, "snapshots")) or os.path.exists(os.path.join(path, LOG))):
            raise UsageError(
                f"{path} is neither a schedule's folder ({SCHEDULE_FILE}) nor an output folder (snapshots, {LOG})",
                "give the folder that `stagerun run` is given, or the one that it writes to",
            )
    if len(folders) > 2 or (len(folders) == 2 and outs):
        raise UsageError(
            "two schedules are shown beside each other, or one with its runs", "leave out the other folders"
        )
    require_different(paths)
    if not folders and options.get("overrides"):
        raise UsageError("--set is for a schedule's folder, and none is given", "leave it out")
    if len(folders) == 2 and options.get("overrides"):
        raise UsageError("--set is for one schedule, and two are given", "leave it out")
    return Asked(folders=folders, outs=tuple(map(Path, outs)), **options)  # type: ignore[arg-type]


def _is_schedule(path: str) -> bool:
    """A file, or nothing, counts as a mistake in one, which reading it says."""
    return os.path.exists(os.path.join(path, SCHEDULE_FILE)) or not os.path.isdir(path)


def sign(paths: Sequence[Path]) -> Sign:
    found = []
    for path in paths:
        with suppress(OSError, ValueError):
            stat = os.stat(path)
            found.append((str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return tuple(found)


class Looker:
    """`before` and `seen` are as of the last `look`; `error` is what is wrong with the schedule now, while `before` is its last version
    without mistakes."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.before: Before | None = None
        self.error: StagerunError | None = None
        self.seen: tuple[Seen, ...] = ()
        self._followers: dict[Path, Follower] = {}
        self._files: tuple[Path, ...] = ()
        self._read: tuple[Sign, Sign] = ((), ())
        self._followed: Sign = ()

    # -- what has changed

    @property
    def outs(self) -> tuple[Path, ...]:
        if self.asked.outs or self.before is None or len(self.asked.folders) != 1:
            return self.asked.outs
        return (output_folder(self.before.schedule.name, None),)

    @property
    def watched(self) -> list[Path]:
        """Folders in which a change counts at once."""
        return list(dict.fromkeys([*map(Path, self.asked.folders), *(path.parent for path in self._files)]))

    @property
    def alive(self) -> bool:
        """Whether a run goes on, so that time alone changes something."""
        return any(one.run is not None and one.run.alive for one in self.seen)

    def edited(self) -> bool:
        """Whether a schedule's files are others than those that were read."""
        return bool(self.asked.folders) and sign(self._sources()) != self._read[0]

    def moved(self) -> bool:
        """Whether an output folder holds something else than it did."""
        return self.alive or sign(self._places()) != self._followed

    def _sources(self) -> list[Path]:
        return [*map(Path, self.asked.folders), *self._files]

    def _places(self) -> list[Path]:
        """What changes where a run does something."""
        return [out / name for out in self.outs for name in (".", LOG, "snapshots", "results", "run.lock")]

    def _saved(self) -> Sign:
        return sign([place(out) for out in self.outs for place in (snapshots_folder, results_folder)])

    # -- looking

    def look(self) -> None:
        """Reads what has changed."""
        self._files = tuple(self._schedule_files())
        now = sign(self._sources()), self._saved()
        if now != self._read or self.before is None:
            self._read_schedule()
            self._read = now[0], self._saved()  # the name may be another, and with it the output folder
        self._followed = sign(self._places())
        named = labels([str(out) for out in self.outs])
        self.seen = tuple(self._see(out, label) for out, label in zip(self.outs, named, strict=True))
        if self.before is None and not self.asked.folders:
            self._read_schedule()

    def _schedule_files(self) -> Iterator[Path]:
        for folder in self.asked.folders:
            yield from (Path(folder) / name for name in look_at(Path(folder)))

    def _read_schedule(self) -> None:
        try:
            if self.asked.folders:
                self.before, self.error = self._of_folders(), None
            else:
                self.before, self.error = self._of_runs(), None
        except StagerunError as error:
            self.error = error

    def _of_folders(self) -> Before:
        folder = self.asked.folders[0]
        schedule = load(folder, self.asked.overrides)
        found = lint(schedule)
        if len(self.asked.folders) == 2:
            both = compare(*self.asked.folders)
            plan = make_plan(schedule, Inventory())
            return Before(
                schedule=schedule, plan=plan, picture=overlay(both), findings=problems(schedule, found), compared=both
            )
        out = self.asked.outs[0] if self.asked.outs else output_folder(schedule.name, None)
        plan = plan_of(schedule, out)
        hours = find_hours(plan, out, self.asked.images_per_second)
        ensembles = planned_ensembles(plan, out)
        together = ensembles_left(plan.schedule, ensembles, hours.speeds) if hours else {}
        blocks = [ensembles_text(ensembles)]
        if self.asked.allocation is not None:
            blocks.append(render_budget(find_budget(plan, hours, self.asked.allocation, together)))
        return Before(
            schedule=plan.schedule,
            plan=plan,
            picture=make_picture(schedule),
            findings=problems(schedule, found),
            notes=(*remarks(plan), *results_remark(plan, out), *choices_remark(plan, out)),
            blocks=tuple(blocks),
            hours=hours,
            together=together,
        )

    def _of_runs(self) -> Before | None:
        """The schedule of the first run that has a snapshot."""
        for out in self.asked.outs:
            schedule = newest_recipe(out, store.inventory(DISK, out, looking=True))
            if schedule is not None:
                plan = make_plan(schedule, Inventory())
                return Before(schedule=schedule, plan=plan, picture=make_picture(schedule), stored=True)
        return None

    def _see(self, out: Path, label: str) -> Seen:
        try:
            schedule = self.before.schedule if self.before is not None and self.asked.folders else None
            status = look(Target(out, looked_at(schedule, out) if schedule is not None else None), time.time())
            trace = run = None
            if os.path.exists(out / LOG):
                follower = self._followers.setdefault(out, Follower(out, most=900 // max(1, len(self.outs)) + 60))
                past = follower.read()
                run = run_of(out, label, past, *word_of(status), lambda _: None)
                trace = follower.trace("" if len(self.outs) == 1 else label, past, status)
            return Seen(label=label, status=status, run=run, trace=trace)
        except StagerunError as error:
            return Seen(label=label, error=error.message)
