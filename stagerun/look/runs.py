"""Output folders as a report sees them: the history, snapshots and results of each, and whether its run is alive. Changes nothing."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from stagerun import store
from stagerun.base.events import EnsembleTested, StageFinished
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import SnapshotRef, passed_over
from stagerun.language.build import completed
from stagerun.logs.lines import other_sets
from stagerun.logs.log_file import LOG
from stagerun.look.history import POINTS, History, Reader, Stage
from stagerun.plan import under
from stagerun.plan.ensembles import made_of
from stagerun.tools.output import DISK, Target, newest_recipe
from stagerun.tools.status import Status, look
from stagerun.train.results import ensemble_on_disk, read_result

LEAST_POINTS = 60  # of the curves of one of many runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`identities`: by stage, of its newest snapshot, completed with defaults. `snapshots`: (stage, iteration) of those on disk. `word`:
    the state by `status`, for a log without an end."""

    label: str
    history: History
    out: Path = Path()
    identities: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    ensembles: tuple[EnsembleTested, ...] = ()
    snapshots: frozenset[tuple[str, int]] = frozenset()
    alive: bool = False
    word: str = ""

    @property
    def few_classes(self) -> frozenset[str]:
        """Return `Schedule.few_classes`."""
        fields = self.identities.items()
        return frozenset(name for name, one in fields if one.get("model.num_classes") in {*"12345"})

    def path(self, stage: Stage) -> list[Stage]:
        """Return the stage and its ancestors, itself first."""
        path = {stage.name: stage}  # a damaged log may lead in a circle
        while (parent := self.history.parent(stage)) and parent.name not in path:
            path[parent.name] = stage = parent
        return [*path.values()]

    def is_stale(self, stage: Stage) -> bool:
        """Return whether it was finished from a snapshot that its parent, or an ancestor's parent, has since replaced."""
        steps = pairwise(self.path(stage))
        return stage.finished is not None and any(child.origin.attempt <= parent.older for child, parent in steps)

    def seed(self, stage: Stage) -> str:
        """Return the seeds that the stage and its ancestors drew from, oldest first: `3` or `3, 7`."""
        seeds = []
        for step in reversed(self.path(stage)):
            logged = "" if step.origin.stage else step.start.removeprefix("seed ")
            seeds.append(self.identities.get(step.name, {}).get("solver.random_seed", logged))
        return ", ".join(dict.fromkeys(filter(None, seeds)))

    def gain(self, stage: Stage) -> float | None:
        """Return top-1 minus the top-1 of the snapshot or average it started with; None if either wasn't evaluated."""
        before, after = self._before(stage), stage.finished.top1 if stage.finished else None
        return None if before is None or after is None else after - before

    def _before(self, stage: Stage) -> float | None:
        parent = self.history.parent(stage)
        if stage.weights:  # an ensemble
            identity = self.identities.get(stage.name)
            same = (one for one in self.ensembles if one.name == stage.weights and made_of(identity, one))
            return next((tested.top1 for tested in same), None)
        if parent is None or self.is_stale(stage):
            return None
        if self.history.follows(stage) is not None:
            return parent.finished.top1 if parent.finished else None
        images = {test.images for test in stage.tests}
        tests = [test for test in parent.tests if not test.ema and test.images in images]
        return next((test.top1 for test in tests if test.iter == stage.origin.iter), None)

    def start(self, stage: Stage) -> str:
        """Return what it was trained from: `seed`, `main`, `main@7638` or a file."""
        if stage.weights or not stage.origin.stage:
            return stage.weights or "seed"
        return stage.origin.stage if self.history.follows(stage) else f"{stage.origin.stage}@{stage.origin.iter}"

    def state(self, stage: Stage) -> str:
        if stage.left_out:
            return "no longer in the schedule" if stage.gone else "not enabled"
        if stage.finished:
            return f"done, from an earlier {stage.origin.stage}" if self.is_stale(stage) else "done"
        if not stage.trained:
            return "not started"
        return "trained, not evaluated" if stage.iter == stage.length else f"at {stage.iter} of {stage.length}"

    def leaves(self) -> list[Stage]:
        """Return the started stages at whose end no other stage starts."""
        started = [s for s in self.history.stages if (s.trained or s.finished) and not s.left_out]
        parents = {parent.name for s in started if (parent := self.history.follows(s))}
        return [stage for stage in started if stage.name not in parents]

    def seconds(self, stage: Stage) -> float:
        """Return the seconds of training along its path, of an ancestor up to where it left."""
        steps = pairwise(self.path(stage))
        return stage.seconds + sum(parent.seconds_until(child.origin.iter) for child, parent in steps)

    @property
    def state_in_words(self) -> str:
        states = [self.state(stage) for stage in self.history.stages if not stage.left_out]
        done = states.count("done")
        if done == len(states) and not self.alive:
            return "finished"
        end = self.word if self.alive else self.history.lives[-1].end or self.word
        return f"{done} of {len(states)} stages done, {end}"

    def notes(self) -> Iterator[str]:
        """Yield scores that the tables lack, and gaps in the numbers."""
        for stage in self.history.stages:
            if stage.finished is not None:
                yield from (f"{self.label}: {line}" for line in other_sets(stage.finished, self.few_classes))
        if self.history.damaged:
            yield f"{self.label}: unreadable lines of log.jsonl, after a kill or on a full disk: {self.history.damaged}"
        if self.history.unknown:
            yield f"{self.label}: lines of log.jsonl that only a later stagerun reads: {self.history.unknown}"
        for stage in self.history.stages:
            if stage.trained and (missing := stage.iter - stage.begins - len(stage.updates["iter"])):
                yield f"{self.label}: iterations of {stage.name} without a line in log.jsonl: {missing}"


# -- folders


def read_runs(outs: Sequence[str], say: Callable[[str], None]) -> list[Run]:
    """Read each folder; `say` hears what is left out. UsageError for a folder without a run."""
    empty = [name for name in outs if os.path.isdir(name) and not os.path.lexists(os.path.join(name, LOG))]
    if len(empty) < len(outs):  # `out/*` may match folders in which nothing was run
        for name in empty:
            say(f"{name} has no {LOG} and is left out")
        outs = [name for name in outs if name not in empty]
    runs = []
    for out, label in zip(map(Path, outs), labels(outs), strict=True):
        history = Reader(out, max(LEAST_POINTS, POINTS // len(outs))).read()
        runs.append(run_of(out, label, history, look(Target(out), time.time()), say))
    return runs


def stored_schedule(outs: Iterable[Path]) -> Schedule | None:
    """Return the schedule of the newest snapshot in the first folder that has one."""
    schedules = (newest_recipe(out, store.inventory(DISK, out, looking=True)) for out in outs)
    return next(filter(None, schedules), None)


def labels(outs: Sequence[str]) -> Sequence[str]:
    """Return a short name for each run: its folder's, or its path if two folders have the same name."""
    names = [Path(out).resolve().name for out in outs]
    return names if len({*names}) == len(names) else outs


def run_of(out: Path, label: str, history: History, status: Status | None, say: Callable[[str], None]) -> Run:
    """Return a history together with the folder's snapshots and results. `status`: None if the log has an end."""
    disk = store.inventory(DISK, out, looking=True)
    for name in disk.forbidden:
        say(f"{out}: {passed_over(name)}")
    inventory = under(disk, history.names)
    identities: dict[str, Mapping[str, str]] = {}
    for stage in history.stages:
        refs = [ref for ref in inventory.of(stage.name) if ref.attempt > stage.older]
        if refs:
            identities[refs[-1].stage] = completed(refs[-1].identity)
        stage.finished = stage.finished or _result(out, stage, refs)
    finished = {stage.name for stage in history.stages if stage.finished and not stage.left_out}
    owners = {ref.id: ref.stage for ref in inventory.snapshots}
    tested = (ensemble_on_disk(out, name, inventory) for name in (history.run.ensembles if history.run else ()))
    return Run(
        label=label,
        out=out,
        history=history,
        identities=identities,
        ensembles=tuple(
            one for one in tested if one is not None and {owners.get(id) for id in one.snapshots} <= finished
        ),
        snapshots=frozenset((ref.stage, ref.iter) for ref in inventory.snapshots),
        alive=status is not None and status.state in ("running", "starting"),
        word=status.state if status is not None else "",
    )


def _result(out: Path, stage: Stage, refs: Sequence[SnapshotRef]) -> StageFinished | None:
    """Return the result from its file: a full disk may have swallowed the line. A shorter version's result doesn't count."""
    for ref in reversed(refs):
        result = read_result(out, ref) if ref.ends(stage.length or ref.iter) else None
        if result is not None and result.snapshot == ref.name:
            return result
    return None
