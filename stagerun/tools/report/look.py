"""Output folders as a report sees them: the log of each, its snapshots and results, and whether it is alive. Changes nothing."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stagerun import store
from stagerun.base.errors import UsageError
from stagerun.base.events import EnsembleTested
from stagerun.base.snapshots import Inventory, SnapshotRef, passed_over
from stagerun.language.build import completed
from stagerun.logs.log_file import LOG
from stagerun.plan.counting import under
from stagerun.plan.ensembles import made_of
from stagerun.tools.report.history import History, Run, StageHistory
from stagerun.tools.report.replay import Reader, is_schedule
from stagerun.tools.status.evaluated import ensemble_on_disk
from stagerun.tools.status.look import Status, look
from stagerun.tools.status.output import Target
from stagerun.train.results import read_ensemble, read_result, top1_of

POINTS, LEAST_POINTS = 900, 60  # of all runs' curves together, and of one


def look_at_all(outs: Sequence[str], say: Callable[[str], None]) -> list[Run]:
    """What was run in each folder, under a short name. UsageError for one named twice, and where nothing was run."""
    require_different(outs)
    outs = with_a_log(outs, say)
    points = max(LEAST_POINTS, POINTS // len(outs))
    return [look_at(Path(out), label, points, say) for out, label in zip(outs, labels(outs), strict=True)]


def require_different(outs: Sequence[str]) -> None:
    seen: dict[Path, str] = {}
    for out in outs:
        real = Path(out).resolve()
        if real in seen:
            raise UsageError(f"{out} and {seen[real]} are the same folder", "name each run once")
        seen[real] = out


def with_a_log(outs: Sequence[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Drops folders in which nothing was run yet, which `out/*` may match; keeps all if there are no others."""
    empty = [
        out for out in outs if os.path.isdir(out) and not is_schedule(Path(out)) and not os.path.exists(Path(out) / LOG)
    ]
    if len(empty) == len(outs):
        return tuple(outs)
    for out in empty:
        say(f"{out} has no {LOG} and is left out")
    return tuple(out for out in outs if out not in empty)


def labels(outs: Sequence[str]) -> list[str]:
    """A short name for each run: the folder's, where no other has the same."""
    names = [Path(out).resolve().name for out in outs]
    found = [name if name and names.count(name) == 1 else out for name, out in zip(names, outs, strict=True)]
    # A path may hold anything, bytes that are not text among it.
    return ["".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in label) for label in found]


def look_at(out: Path, label: str, points: int, say: Callable[[str], None]) -> Run:
    """`points` stay of its curves; `say` gets what is passed over. UsageError for a folder without a run."""
    past = Reader(out, points).read()
    return run_of(out, label, past, *_word(out, past), say)


def run_of(out: Path, label: str, past: History, alive: bool, word: str, say: Callable[[str], None]) -> Run:
    """What its log says, with what its folder does. `alive` and `word`: as of `Run`."""
    found = store.inventory(store.LocalDisk(), out, looking=True)
    for name in found.forbidden:
        say(f"{out}: {passed_over(name)}")
    inventory = under(found, past.names)
    past = replace(past, stages=tuple(_with_result(out, stage, inventory) for stage in past.stages))
    past = replace(past, ensembles=tuple(_ensembles(out, past, inventory)))
    ends = {stage.name: ref for stage in past.stages if (ref := _end(inventory, stage)) is not None}
    members = {id for tested in past.ensembles for id in tested.snapshots}
    made_from = [ref for ref in inventory.snapshots if ref.id in members]
    return Run(
        label=label,
        out=out,
        history=past,
        identities={name: completed(ref.identity) for name, ref in ends.items()},
        environments={name: ref.environment for name, ref in ends.items()},
        stale=_stale(past, inventory, ends),
        alive=alive,
        word=word,
        before=dict(_before(out, past, inventory, ends)),
        results={ref.id: result for ref in made_from if (result := read_result(out, ref)) is not None},
        snapshots=frozenset((ref.stage, ref.iter) for ref in inventory.snapshots),
    )


_WORDS = {
    "running": "running",
    "starting": "starting, nothing logged yet",
    "killed": "killed, or ended without a word",
    "elsewhere": "no word of an end, from a machine that this one can't see",
}


def _word(out: Path, past: History) -> tuple[bool, str]:
    """Whether the run is alive, and what `status` says of it where its log doesn't. `status` isn't needed where nothing holds
    the folder and the log has an end."""
    if past.lives and past.lives[-1].end and store.holder(out) is None:
        return False, ""
    return word_of(look(Target(out), time.time()))


def word_of(status: Status) -> tuple[bool, str]:
    """Whether the run is alive, and what `status` says of it where its log may not."""
    word = "running, but silent" if status.silent else _WORDS.get(status.state, "")
    return status.state in ("running", "starting"), word


def _refs(inventory: Inventory, stage: StageHistory) -> list[SnapshotRef]:
    """The stage's snapshots, oldest first, without those from before it started over."""
    return [ref for ref in inventory.of(stage.name) if ref.attempt > stage.older]


def _end(inventory: Inventory, stage: StageHistory) -> SnapshotRef | None:
    """The snapshot that the stage ended with; the newest where there is none. A piece of it may have been trained since."""
    refs = _refs(inventory, stage)
    end = stage.finished.snapshot if stage.finished else ""
    return next((ref for ref in refs if ref.name == end), refs[-1] if refs else None)


def _with_result(out: Path, stage: StageHistory, inventory: Inventory) -> StageHistory:
    """Takes the result from its file where the log, on a full disk, has lost the line that the stage was finished. One of a stage that was
    shorter and goes on is not its own."""
    if stage.finished is None:
        for ref in reversed(_refs(inventory, stage)):
            if stage.max_iter and not ref.ends(stage.max_iter):
                continue
            result = read_result(out, ref)
            if result is not None and result.snapshot == ref.name:
                return replace(stage, finished=result, max_iter=stage.max_iter or result.iterations)
    return stage


def _ensembles(out: Path, past: History, inventory: Inventory) -> Iterator[EnsembleTested]:
    """In the order of the schedule, those whose members it trains; of one whose line is lost, its file."""
    logged = {tested.name: tested for tested in past.ensembles}
    finished = {stage.name for stage in past.stages if stage.finished and not stage.left_out}
    for name in past.planned_ensembles:
        tested = logged.get(name) or ensemble_on_disk(out, name, inventory)
        if tested is not None and tested.stages <= finished:
            yield tested


def _before(
    out: Path, past: History, inventory: Inventory, ends: Mapping[str, SnapshotRef]
) -> Iterator[tuple[str, float]]:
    """The top-1 that each stage's gain is against, as `Run.before` has it. An average counts if it is the one that the stage started from."""
    for stage in past.stages:
        end = ends.get(stage.name)
        if end is None or stage.finished is None:
            continue
        top1 = None
        if stage.average:
            tested = read_ensemble(out, stage.average)
            top1 = tested.top1 if tested is not None and made_of(end, tested) else None
        elif past.follows(stage) is None:
            top1 = top1_of(out, end.parent, inventory, stage.finished.tested_set)
        if top1 is not None:
            yield stage.name, top1


def _stale(past: History, inventory: Inventory, ends: dict[str, SnapshotRef]) -> frozenset[str]:
    """Finished stages that started from another snapshot of their parent than it has there now, and what follows from them."""
    found: set[str] = set()
    for stage in past.stages:
        parent = past.stage(stage.parent) if stage.parent else None
        if parent is None or stage.finished is None:
            continue
        if parent.name in found or _from_another(past, stage, parent, inventory, ends.get(stage.name)):
            found.add(stage.name)
    return frozenset(found)


def _from_another(
    past: History, stage: StageHistory, parent: StageHistory, inventory: Inventory, end: SnapshotRef | None
) -> bool:
    length = parent.finished.iterations if parent.finished else parent.max_iter
    place = stage.parent_iter if past.follows(stage) is None else length
    there = [ref.id for ref in _refs(inventory, parent) if ref.iter == place]
    if end is not None and there:
        return end.parent not in there
    # What it started from is gone, or not made again yet, which says nothing. That the parent has started over since says it.
    return stage.parent_attempt <= parent.older
