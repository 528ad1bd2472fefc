"""What the page is about: schedules' folders and output folders, read again when they have changed. Changes nothing."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import Problem, StagerunError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.command.shared import output_folder
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE, stage_files
from stagerun.plan import make_plan
from stagerun.plan.budget import render_budget
from stagerun.plan.ensembles import ensembles_left
from stagerun.store.given import looked_at
from stagerun.store.layout import results_folder, snapshots_folder
from stagerun.tools.diff.command import Found, compare, overlay
from stagerun.tools.lint import lint, problems
from stagerun.tools.plan.command import choices_remark, disk_remark, remarks, results_remark
from stagerun.tools.report.look import labels, require_different, run_of, word_of
from stagerun.tools.view.before import Before
from stagerun.tools.view.chart import file
from stagerun.tools.view.during import Seen
from stagerun.tools.view.follow import Follower
from stagerun.train.hours import find_budget, find_hours
from stagerun.train.output import DISK, LOG, Target, newest_recipe, plan_of
from stagerun.train.results import planned_ensembles
from stagerun.train.status import Status, look

MOST = 1200  # points of all runs' curves together

# The name, time of change, size and number of each file: equal as long as nothing has changed.
Sign = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`folders`: none, one, or two schedules that are compared. `outs`: output folders; if there are none, that of the schedule by
    default."""

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
        self._signs: dict[Path, Sign] = {}
        self._seen_outs: tuple[Path, ...] = ()
        self._files: tuple[Path, ...] = ()
        self._read: tuple[Sign, Sign] = ((), ())
        self._loaded: tuple[Sign, Schedule, Picture, tuple[Problem, ...], Found | None] | None = None

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
        """Whether an output folder holds something else than it did, or may."""
        if len(self.seen) != len(self.outs):
            return True
        return any(
            self._goes_on(out, one) or sign(_places(out)) != self._signs.get(out)
            for out, one in zip(self.outs, self.seen, strict=True)
        )

    @property
    def behind(self) -> bool:
        """Whether there is more of a log to read."""
        waiting = any(one.waiting for one in self.seen)
        return waiting or any(self._followers[out].behind for out in self.outs if out in self._followers)

    def _sources(self) -> list[Path]:
        return [*map(Path, self.asked.folders), *self._files]

    def _saved(self) -> Sign:
        return sign([place(out) for out in self.outs for place in (snapshots_folder, results_folder)])

    # -- looking

    def look(self, seconds: float = float("inf")) -> None:
        """Reads what has changed; logs for so many seconds in all, and the rest of them next time."""
        self._files = tuple(self._schedule_files())
        now = sign(self._sources()), self._saved()
        if now != self._read or (self.before is None and self.error is None):
            self._read_schedule(now[0])
            self._read = now[0], self._saved()  # the name may be another, and with it the output folder
        self._see_all(time.monotonic() + seconds)

    def glance(self) -> None:
        """Whether runs that go on do so, and how far they are: what costs little."""
        self.seen = tuple(self._glanced(out, one) for out, one in zip(self.outs, self.seen, strict=False))

    def _glanced(self, out: Path, one: Seen) -> Seen:
        if one.run is None or not one.run.alive:
            return one
        try:
            status = self._status(out)
            alive, word = word_of(status)
            return replace(one, status=status, run=replace(one.run, alive=alive, word=word))
        except StagerunError as error:
            return Seen(label=one.label, error=error.message)

    # -- schedules

    def _schedule_files(self) -> Iterator[Path]:
        for folder in self.asked.folders:
            names = set()
            with suppress(OSError, ValueError):  # gone for the moment, or not a text: reading it says so
                names |= {name for name in os.listdir(folder) if name.endswith(".prototxt")}
                names |= set(stage_files((Path(folder) / SCHEDULE_FILE).read_bytes()))
            yield from (Path(folder) / name for name in sorted(names))

    def _read_schedule(self, files: Sign) -> None:
        try:
            self.before = self._of_folders(files) if self.asked.folders else self._of_runs()
            self.error = None
        except StagerunError as error:
            self.error = error

    def _of_folders(self, files: Sign) -> Before:
        if self._loaded is None or self._loaded[0] != files:
            schedule = load(self.asked.folders[0], self.asked.overrides)
            both = compare(*self.asked.folders) if len(self.asked.folders) == 2 else None
            picture = make_picture(schedule) if both is None else overlay(both)
            self._loaded = files, schedule, picture, problems(schedule, lint(schedule)), both
        _, schedule, picture, findings, both = self._loaded
        if both is not None:
            plan = make_plan(schedule, Inventory())
            return Before(schedule=schedule, plan=plan, picture=picture, findings=findings, compared=both)
        out = self.asked.outs[0] if self.asked.outs else output_folder(schedule.name, None)
        plan = plan_of(schedule, out)
        hours = find_hours(plan, out, self.asked.images_per_second)
        ensembles = planned_ensembles(plan, out)
        together = ensembles_left(plan.schedule, ensembles, hours.speeds) if hours else {}
        blocks = []
        if self.asked.allocation is not None:
            blocks.append(render_budget(find_budget(plan, hours, self.asked.allocation, together)))
        return Before(
            schedule=plan.schedule,
            plan=plan,
            picture=picture,
            findings=findings,
            notes=(*remarks(plan), *disk_remark(plan, out), *results_remark(plan, out), *choices_remark(plan, out)),
            ensembles=ensembles,
            blocks=tuple(blocks),
            hours=hours,
            together=together,
        )

    def _of_runs(self) -> Before | None:
        """The schedule of the first run that has a snapshot; as the newest one has it."""
        for out in self.asked.outs:
            schedule = newest_recipe(out, store.inventory(DISK, out, looking=True))
            if schedule is not None:
                if self.before is not None and self.before.schedule == schedule:
                    return self.before
                plan = make_plan(schedule, Inventory())
                return Before(schedule=schedule, plan=plan, picture=make_picture(schedule), stored=True)
        return None

    # -- runs

    def _see_all(self, deadline: float) -> None:
        outs, was = self.outs, dict(zip(self._seen_outs, self.seen, strict=False))
        named = labels([str(out) for out in outs])
        found = []
        for out, label in zip(outs, named, strict=True):
            now, last = sign(_places(out)), was.get(out)
            same = last is not None and now == self._signs.get(out) and not self._goes_on(out, last)
            if same and last is not None:
                found.append(last)
            elif out not in self._followers and time.monotonic() > deadline:
                found.append(Seen(label=label, waiting=True))
                continue
            else:
                found.append(self._see(out, label, deadline))
            self._signs[out] = now
        self.seen, self._seen_outs = tuple(found), outs

    def _goes_on(self, out: Path, last: Seen) -> bool:
        alive = last.run is not None and last.run.alive
        return alive or last.waiting or (out in self._followers and self._followers[out].behind)

    def _see(self, out: Path, label: str, deadline: float) -> Seen:
        several = len(self.outs) > 1
        try:
            if not os.path.exists(out / LOG):
                return Seen(label=label, status=self._status(out))
            follower = self._followers.setdefault(out, Follower(out, most=max(100, MOST // len(self.outs))))
            past = follower.read(max(0.0, deadline - time.monotonic()))
            # Of many runs that have ended by their logs, their logs say enough.
            ended = several and bool(past.lives[-1].end) and store.holder(out) is None
            status = None if ended else self._status(out)
            run = run_of(out, label, past, *(word_of(status) if status else (False, "")), lambda _: None)
            trace = follower.trace(label if several else "", run.history, run.alive)
            return Seen(label=label, status=status, run=run, trace=trace)
        except StagerunError as error:
            return Seen(label=label, error=error.message)

    def _status(self, out: Path) -> Status:
        schedule = None  # of one run alone; of many it says too little for what it costs
        if self.before is not None and self.asked.folders and len(self.outs) == 1:
            schedule = self.before.schedule
        return look(Target(out, schedule if schedule is None else looked_at(schedule, out)), time.time())


def _places(out: Path) -> list[Path]:
    """What changes where a run does something."""
    return [out / name for name in (".", LOG, "snapshots", "results")]


def drawn(outs: Sequence[str]) -> bytes:
    """`report --plot`: the chart of the schedule of these runs, with what they have done. UsageError before there is a snapshot."""
    looker = Looker(asked(outs))
    looker.look()
    if looker.before is None:
        raise looker.error or UsageError("no snapshot says yet what is trained", "wait for the first one")
    picture = looker.before.picture
    traces = [one.trace for one in looker.seen if one.trace is not None]
    return file(picture, Unit.EPOCHS, make_scale(picture), traces)
