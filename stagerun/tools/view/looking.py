"""What the page is about: schedules' folders and output folders, read again when they have changed. Changes nothing."""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.errors import Problem, StagerunError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.command.shared import output_folder
from stagerun.data.weights import looked_at
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE, stage_nodes
from stagerun.logs.log_file import LOG
from stagerun.plan import make_plan
from stagerun.store.layout import results_folder, snapshots_folder
from stagerun.tools.lint import lint
from stagerun.tools.plan.command import choices_remark, disk_remark, remarks, results_remark
from stagerun.tools.plan.hours import beside
from stagerun.tools.report.look import labels, require_different, run_of, word_of
from stagerun.tools.report.replay import Reader
from stagerun.tools.status.look import Status, look
from stagerun.tools.status.output import DISK, Target, newest_recipe, plan_of
from stagerun.tools.view.before import Before
from stagerun.tools.view.chart import file
from stagerun.tools.view.during import Seen

MOST = 1200  # points of all runs' curves together

# The name, time of change, size and number of each file: equal as long as nothing has changed.
Sign = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`folder`: of a schedule, or ''. `outs`: output folders; if there are none, that of the schedule by default."""

    folder: str
    outs: tuple[Path, ...]
    overrides: tuple[str, ...] = ()
    images_per_second: float | None = None
    allocation: float | None = None


def asked(paths: Sequence[str], **options: object) -> Asked:
    """UsageError for a folder that is neither, or too many schedules."""
    folders = tuple(path for path in paths if os.path.exists(os.path.join(path, SCHEDULE_FILE)))
    outs = tuple(path for path in paths if path not in folders)
    for path in outs:
        if not (os.path.isdir(os.path.join(path, "snapshots")) or os.path.exists(os.path.join(path, LOG))):
            raise UsageError(
                f"{path} is neither a schedule's folder ({SCHEDULE_FILE}) nor an output folder (snapshots, {LOG})",
                "give the folder that `stagerun run` is given, or the one that it writes to",
            )
    require_different(paths)
    if len(folders) > 1:
        raise UsageError("two schedules are given, and one is shown", "`stagerun diff` compares two, --plot draws both")
    if not folders and options.get("overrides"):
        raise UsageError("--set is for a schedule's folder, and none is given", "leave it out")
    return Asked(folder="".join(folders), outs=tuple(map(Path, outs)), **options)  # type: ignore[arg-type]


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
        self._readers: dict[Path, Reader] = {}
        self._signs: dict[Path, Sign] = {}
        self._seen_outs: tuple[Path, ...] = ()
        self._files: tuple[Path, ...] = ()
        self._read: tuple[Sign, Sign] = ((), ())
        self._loaded: tuple[Sign, Schedule, Picture, tuple[Problem, ...]] | None = None

    # -- what has changed

    @property
    def outs(self) -> tuple[Path, ...]:
        if self.asked.outs or self.before is None or not self.asked.folder:
            return self.asked.outs
        return (output_folder(self.before.schedule.name, None),)

    @property
    def alive(self) -> bool:
        """Whether a run goes on, so that time alone changes something."""
        return any(one.run is not None and one.run.alive for one in self.seen)

    def edited(self) -> bool:
        """Whether a schedule's files are others than those that were read."""
        return bool(self.asked.folder) and sign(self._sources()) != self._read[0]

    def moved(self) -> bool:
        """Whether an output folder holds something else than it did, or may."""
        outs = self.outs
        return outs != self._seen_outs or self.alive or any(sign(_places(out)) != self._signs.get(out) for out in outs)

    def _sources(self) -> list[Path]:
        return [Path(self.asked.folder), *self._files] if self.asked.folder else []

    def _saved(self) -> Sign:
        return sign([place(out) for out in self.outs for place in (snapshots_folder, results_folder)])

    # -- looking

    def look(self) -> None:
        """Reads what has changed."""
        self._files = self._schedule_files()
        now = sign(self._sources()), self._saved()
        if now != self._read or (self.before is None and self.error is None):
            self._read_schedule(now[0])
            self._read = now[0], self._saved()  # the name may be another, and with it the output folder
        self._see_all()

    # -- schedules

    def _schedule_files(self) -> tuple[Path, ...]:
        folder, names = Path(self.asked.folder), set()
        with suppress(OSError, ValueError):  # gone for the moment, or not a text: reading it says so
            names |= {name for name in os.listdir(folder) if name.endswith(".prototxt")}
            names |= {node.file for node in stage_nodes((folder / SCHEDULE_FILE).read_bytes()) if node.file is not None}
        return tuple(folder / name for name in sorted(names)) if self.asked.folder else ()

    def _read_schedule(self, files: Sign) -> None:
        try:
            self.before = self._of_folder(files) if self.asked.folder else self._of_runs()
            self.error = None
        except StagerunError as error:
            self.error = error

    def _of_folder(self, files: Sign) -> Before:
        if self._loaded is None or self._loaded[0] != files:
            schedule = load(self.asked.folder, self.asked.overrides)
            self._loaded = files, schedule, make_picture(schedule), lint(schedule)
        _, schedule, picture, findings = self._loaded
        out = self.asked.outs[0] if self.asked.outs else output_folder(schedule.name, None)
        plan = plan_of(schedule, out)
        return Before(
            schedule=plan.schedule,
            plan=plan,
            picture=picture,
            findings=findings,
            notes=(*remarks(plan), *disk_remark(plan, out), *results_remark(plan, out), *choices_remark(plan, out)),
            blocks=beside(plan, out, self.asked.images_per_second, self.asked.allocation).blocks,
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

    def _see_all(self) -> None:
        outs, was = self.outs, dict(zip(self._seen_outs, self.seen, strict=True))
        found = []
        for out, label in zip(outs, labels([str(out) for out in outs]), strict=True):
            now, last = sign(_places(out)), was.get(out)
            same = last is not None and now == self._signs.get(out) and not (last.run is not None and last.run.alive)
            found.append(last if same and last is not None else self._see(out, label))
            self._signs[out] = now
        self.seen, self._seen_outs = tuple(found), outs

    def _see(self, out: Path, label: str) -> Seen:
        try:
            if not os.path.exists(out / LOG):
                return Seen(label=label, status=self._status(out))
            points = max(100, MOST // len(self.outs))
            past = self._readers.setdefault(out, Reader(out, points)).read()
            # Of many runs that have ended by their logs, their logs say enough.
            ended = len(self.outs) > 1 and bool(past.lives[-1].end) and store.holder(out) is None
            status = None if ended else self._status(out)
            run = run_of(out, label, past, *(word_of(status) if status else (False, "")), lambda _: None)
            return Seen(label=label, status=status, run=run)
        except StagerunError as error:
            return Seen(label=label, error=error.message)

    def _status(self, out: Path) -> Status:
        schedule = None  # of one run alone; of many it says too little for what it costs
        if self.before is not None and self.asked.folder and len(self.outs) == 1:
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
    runs = [one.run for one in looker.seen if one.run is not None]
    return file(picture, Unit.EPOCHS, make_scale(picture), runs)
