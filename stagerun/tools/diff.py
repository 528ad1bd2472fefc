"""`stagerun diff`: what differs between two schedules, or between a schedule and what a run was made from; and where two runs part."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from stagerun import store
from stagerun.base.errors import UsageError
from stagerun.base.recipe import CODE, Schedule, Stage
from stagerun.base.text import count, listed
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag
from stagerun.command.shared import Json, TrustCode
from stagerun.language import load
from stagerun.language.build import is_tested
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.values import NONE, identity, leaves, text
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.tools.library import Snapshot
from stagerun.tools.why import plain_values, settings_of


class Fact(NamedTuple):
    """A setting as people read it, the line that sets it, its canonical text, and whether snapshots depend on it."""

    value: str = NONE
    line: str = ""
    text: str = NONE
    trains: bool = False


Facts = dict[tuple[str, str], Fact]  # by stage, '' for what stages share, and field


class Change(NamedTuple):
    stage: str
    field: str
    a: Fact
    b: Fact

    @property
    def trains(self) -> bool:
        return self.a.trains or self.b.trains


@command()
def diff(
    a: str = argument("A"),
    b: str = argument("B"),
    first: bool = flag("--first", "Of two runs: train short stretches again to name the first difference's tensors."),
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Shows what differs between two schedules: by stage and field, with places.

    A and B are each a schedule's folder, the output folder of a run (what its stages were trained from), or a snapshot's.
    Differences that change no training (paths, intervals) are listed apart. The exit code is 0 in any case; --json has
    `same`, of the schedules, and `equal`, of what both runs have trained.

    Of two runs it also shows the first difference: the stage and iteration, by proofs (`audit_param { proof_iter }`), snapshots and logs;
    the tensors, the positions of the images, and the cause among what the runs record. --first compares the images, too, and trains
    again from the newest snapshot at which both are equal: so it names tensors that no snapshot holds, and an upset bit of the memory.
    """
    (kind, one), (other_kind, other) = schedule_in(a), schedule_in(b)
    both_runs = kind == other_kind == "a run"
    if first and not both_runs:
        raise UsageError("--first: A and B are not two runs", "give the output folders of two runs")
    before, now = facts_of(one), facts_of(other)
    stages, others = ([stage.name for stage in schedule.stages] for schedule in (one, other))
    names = [f"stage {name}: only in A" for name in stages if name not in others]
    names += [f"stage {name}: only in B" for name in others if name not in stages]
    alone = set(stages) ^ set(others)
    pairs = (Change(*key, before.get(key, Fact()), now.get(key, Fact())) for key in before | now)
    changes = [change for change in pairs if change.stage not in alone and change.a.text != change.b.text]
    trained = [change for change in changes if change.trains]
    same = not names and not trained
    record, lines, compared = None, list[str](), dict[str, int]()
    if both_runs:
        from stagerun.tools.first_difference import Run, render, search  # and with it numpy

        found, compared = search((Run(Path(a)), Run(Path(b))), stages, first, trust_code, as_json)
        record, lines = (asdict(found), render(found)) if found is not None else (None, [])
    if as_json:
        fields = [
            {
                "stage": change.stage,
                "field": change.field,
                "a": {"value": change.a.text, "line": change.a.line},
                "b": {"value": change.b.text, "line": change.b.line},
                "trains": change.trains,
            }
            for change in changes
        ]
        facts = {"a": kind, "b": other_kind, "same": same, "names": names, "fields": fields}
        if both_runs:
            facts |= {
                "compared": sum(compared.values()),
                "equal": record is None and any(compared.values()),
                "first": record,
            }
        show(json.dumps(facts, indent=2))
    else:
        blocks = [f"A  {a} ({kind})\nB  {b} ({other_kind})", "\n".join(names), *_blocks(trained, len(stages))]
        if untrained := [change for change in changes if not change.trains]:
            blocks += ["what changes no training:", *_blocks(untrained, len(stages))]
        blocks.append("" if lines or not both_runs else _compared(compared))
        verdict = f"the schedules train {'the same thing' if same else 'different things'}"
        blocks.append(verdict if names or changes or lines else f"{verdict}: nothing differs")
        blocks.append("\n".join(lines))
        show("\n\n".join(filter(None, blocks)))


def _compared(states: dict[str, int]) -> str:
    if any(states.values()):
        without = [f"`{stage}`" for stage, number in states.items() if not number]
        none = f", none of {listed(without)}" if without else ""
        return f"the runs are equal: {count(sum(states.values()), 'state')} compared{none}"
    return "no state to compare: the runs have no proof and no snapshot of the same iteration"


def schedule_in(folder: str) -> tuple[str, Schedule]:
    """Return what the folder is, and its schedule. RecipeError, UsageError, ResumeRefused for a recipe that can't be read, StorageError,
    PermissionDenied."""
    path = Path(folder)
    if os.path.exists(path / SCHEDULE_FILE) or not os.path.isdir(path):
        return "a schedule", load(folder)
    if os.path.exists(path / MANIFEST):
        return "a snapshot", _of_snapshot(path)
    snapshots = store.inventory(store.LocalDisk(), path).snapshots
    if not snapshots:
        raise UsageError(
            f"{folder} is neither a schedule's folder ({SCHEDULE_FILE}) nor a run with a snapshot",
            "give two folders, each of a schedule, of a run (OUT), or of a snapshot (OUT/snapshots/NAME)",
        )
    newest = {ref.stage: ref.name for ref in snapshots}  # which are in the order in which they were written
    trained = {stage: _of_snapshot(snapshots_folder(path) / name) for stage, name in newest.items()}
    last = trained[snapshots[-1].stage]
    # A trained stage stays as it was when the schedule changes; the name of its parent is the newest.
    stages = (replace(trained[s.name].stage(s.name), parent=s.parent) if s.name in trained else s for s in last.stages)
    return "a run", replace(last, stages=tuple(stages))


def _of_snapshot(folder: Path) -> Schedule:
    """Return the recipe, with the digests of the Python that its stage needs."""
    snapshot = Snapshot(folder)
    code = {key: text for key, text in snapshot.ref.identity.items() if key.startswith(CODE)}
    stages = (replace(s, identity=code) if s.name == snapshot.stage else s for s in snapshot.recipe.stages)
    return replace(snapshot.recipe, stages=tuple(stages))


def facts_of(schedule: Schedule) -> Facts:
    settings = settings_of(schedule.stages[0], dict(plain_values(schedule)))
    facts = {("", s.key): Fact(s.value, s.line, s.text, s.key in ("seed", "determinism")) for s in settings}
    for one in schedule.ensembles:
        trains = any(stage.average == one.name for stage in schedule.stages)
        for name in ("members", "rule", "shape", "batch_norm_iter"):
            value = text(getattr(one, name))
            facts["", f"ensemble {one.name}.{name}"] = Fact(value, "", value, trains)
    for stage in schedule.stages:
        facts |= {(stage.name, field): fact for field, fact in _of_stage(schedule, stage)}
    return facts


def _of_stage(schedule: Schedule, stage: Stage) -> Iterator[tuple[str, Fact]]:
    """Yield all settings, with the network and the images, whether they are the stage's or the schedule's."""
    solver, line = replace(stage.solver, model=None), f"{stage.span.path}:{stage.span.line}" if stage.origins else ""
    values = dict([*leaves(stage.model, "model"), *leaves(stage.data, "data"), *leaves(solver, "solver")])
    values |= {key: text for key, text in stage.identity.items() if key.startswith(CODE)}
    start = stage.starts_from or "the seed"
    yield "from", Fact(start, line, start, True)
    yield "enabled", Fact(text(stage.enabled), line, text(stage.enabled))
    for s in settings_of(stage, values):
        trains = identity(s.key, solver.lr_policy) or s.key.startswith(CODE)
        trains = trains or (s.key == "data.train.source" and schedule.changes_set(stage))
        trains = trains or (schedule.followed(stage) is not None and is_tested(s.key))
        set_by = (s.line or "a default") if stage.origins else ""
        yield s.key.removeprefix("solver."), Fact(s.value, set_by, s.text, trains)


def _blocks(changes: Sequence[Change], number: int) -> Iterator[str]:
    """Return a block for the schedule, and for each stage, or several that differ alike. `number`: of stages."""
    alike: dict[tuple[str, str], list[str]] = {}
    for stage, field, *facts in changes:
        shown = [fact.value + (f" ({fact.line})" if fact.line else "") for fact in facts]
        alike.setdefault((field, "  ->  ".join(shown)), []).append(stage)
    blocks: dict[str, list[str]] = {}
    for (field, values), stages in alike.items():
        title = "all stages" if len(stages) == number > 1 else ", ".join(stages) or "the schedule"
        blocks.setdefault(title, []).append(f"  {field}  {values}")
    for title, lines in blocks.items():
        yield "\n".join([title, *lines])
