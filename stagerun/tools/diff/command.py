"""`stagerun diff`: in what two schedules differ, and two schedules, or a schedule and what a run was made from, shown beside each other."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from stagerun import store
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import CODE, Origin, Schedule, Solver, Stage
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.command.ending import show
from stagerun.command.options import argument, command, option
from stagerun.command.shared import Json
from stagerun.drawing.picture import Picture, StagePicture, make_picture
from stagerun.language import load
from stagerun.language.build import is_tested
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.language.values import NONE, differing, identity, leaves, own_images, plain, shown, text
from stagerun.store.layout import MANIFEST, snapshots_folder
from stagerun.tools.plan import plot
from stagerun.tools.status.output import DISK, newest_snapshot
from stagerun.train.progress import MOST_RECIPE, RECIPE


@dataclass(frozen=True, slots=True)
class Value:
    """`text` as people read it, `value` as programs do: numbers in iterations and for the whole batch, None for what is not set.

    `written` is what the file says where that is in another unit, and `place` where it says it: '' for a recipe that was read
    from a snapshot, or a `default`.
    """

    text: str
    written: str = ""
    place: str = ""
    default: bool = False
    value: Any = field(default=None, compare=False)  # of the same text


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """`stage` is '' for what all stages share. `trains`: whether snapshots depend on it."""

    stage: str
    field: str
    a: Value
    b: Value
    trains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`same`: they train the same thing, whatever else differs. `only_a`, `only_b`: names of stages and ensembles."""

    same: bool
    stages: tuple[str, ...]  # that both have
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    fields: tuple[FieldDifference, ...]


def difference(a: Schedule, b: Schedule) -> Difference:
    """In the order of `a`, what only `b` has after it."""
    in_a, in_b = _names(a), _names(b)
    both = [stage.name for stage in a.stages if stage.name in {other.name for other in b.stages}]
    fields = list(_shared(a, b))
    for name in both:
        fields += _stage(a, b, a.stage(name), b.stage(name))
    return Difference(
        same=_trained(a) == _trained(b) and _code(a) == _code(b),
        stages=tuple(both),
        only_a=tuple(name for name in in_a if name not in in_b),
        only_b=tuple(name for name in in_b if name not in in_a),
        fields=tuple(fields),
    )


def _names(schedule: Schedule) -> list[str]:
    return [*(f"stage {s.name}" for s in schedule.stages), *(f"ensemble {e.name}" for e in schedule.ensembles)]


def _trained(schedule: Schedule) -> tuple[object, ...]:
    """What training depends on: for each stage what it starts from and its settings. Names and the order of siblings are not in it."""
    made: dict[str, str] = {}  # digests by stage
    sets = list(dict.fromkeys((s.data.train.path, s.data.train.images) for s in schedule.stages))
    for s in schedule.stages:
        facts = (
            made.get(s.parent or ""),
            s.parent_iter,
            _averaged(schedule, s, made),
            sets.index((s.data.train.path, s.data.train.images)),
            made.get(s.solver.teacher or ""),
            s.data.train.labels_digest,
            s.data.val[0].labels_digest if s.solver.early_stop is not None and s.data.val else None,
            _counting(s),
        )
        made[s.name] = hashlib.sha256(repr(facts).encode()).hexdigest()
    return text(schedule.seed), text(schedule.determinism), sorted(made.values())


def _counting(stage: Stage) -> list[tuple[str, str]]:
    """The settings of a stage that snapshots depend on. Its network stands under one name, whether it is its own or the schedule's."""
    alone = replace(stage.solver, model=None)
    found = [*leaves(stage.model, "model"), *leaves(stage.data, "data"), *leaves(alone, "solver")]
    return [(key, value) for key, value in found if _trains(key, stage.solver)]


def _trains(key: str, solver: Solver) -> bool:
    """Whether snapshots depend on the field, in a stage of these settings."""
    return identity(key, solver.lr_policy) or (solver.early_stop is not None and is_tested(key))


def _code(schedule: Schedule) -> dict[str, str]:
    """The digests of the Python files that it names, and the versions of packages."""
    return {key: text for s in schedule.stages for key, text in s.identity.items() if key.startswith(CODE)}


def _shared(a: Schedule, b: Schedule) -> Iterator[FieldDifference]:
    parts: list[tuple[str, Any, Any]] = [
        (name, getattr(a, name), getattr(b, name))
        for name in ("name", "seed", "model", "data", "determinism", "keep_snapshots")
    ]
    for key, one, other in parts:
        for name, old, new in differing(one, other, key):
            values = (_value(name, old, (text(old), ""), a.origins), _value(name, new, (text(new), ""), b.origins))
            yield FieldDifference("", name, *values, any(_trains(name, s.solver) for s in (*a.stages, *b.stages)))
    one, other = _code(a), _code(b)
    for name in sorted(one.keys() | other.keys()):
        was, now = one.get(name, NONE), other.get(name, NONE)
        if was != now:
            yield FieldDifference(
                "", name, _value(name, was, (was, ""), a.origins), _value(name, now, (now, ""), b.origins), True
            )
    for ensemble in a.ensembles:
        twin = next((e for e in b.ensembles if e.name == ensemble.name), None)
        trains = any(stage.average == ensemble.name for stage in (*a.stages, *b.stages))
        for name in ("members", "rule", "shape", "batch_norm_iter") if twin else ():
            old, new = getattr(ensemble, name), getattr(twin, name)
            if old != new:
                yield FieldDifference("", f"ensemble {ensemble.name}.{name}", _held(old), _held(new), trains)


def _averaged(schedule: Schedule, stage: Stage, made: Mapping[str, str]) -> tuple[object, ...]:
    """What the average that a stage starts from is made of."""
    if stage.average is None:
        return ()
    found = schedule.ensemble(stage.average)
    points = [(made[name], iter) for name, iter in found.points]
    return found.rule.value, found.shape, found.batch_norm_iter, *points


def _stage(a: Schedule, b: Schedule, one: Stage, other: Stage) -> Iterator[FieldDifference]:
    if one.starts_from != other.starts_from:
        old, new = (Value(s.starts_from or "the seed", "", _at(s), value=s.starts_from) for s in (one, other))
        yield FieldDifference(one.name, "from", old, new, True)
    if one.enabled != other.enabled:
        old, new = (_held(s.enabled, _at(s)) for s in (one, other))
        yield FieldDifference(one.name, "enabled", old, new, False)
    owns = own_images(one.data, a.data), own_images(other.data, b.data)
    for name, old, new in differing(*owns, "data"):
        trains = any(_trains(name, s.solver) for s in (one, other)) or name in ("data", "data.train.images")
        yield FieldDifference(one.name, name, _held(old), _held(new), trains)
    for key, mine, its in differing(one.solver, other.solver, "solver"):
        yield FieldDifference(
            one.name,
            key.removeprefix("solver."),
            _value(key, mine, shown(key, text(mine), one), one.origins),
            _value(key, its, shown(key, text(its), other), other.origins),
            _trains(key, one.solver) or _trains(key, other.solver),
        )


def _at(stage: Stage) -> str:
    return f"{stage.span.path}:{stage.span.line}" if stage.origins else ""


def _held(value: Any, place: str = "") -> Value:
    return Value(text(value), "", place, value=plain(value))


def _value(key: str, value: Any, texts: tuple[str, str], origins: Mapping[str, Origin]) -> Value:
    """With the place of the field; of a message, that of the first of its fields that is written. `texts` as `shown` gives
    them."""
    said, written = texts
    if not origins:
        return Value(said, value=plain(value))
    inside = [origins[key]] if key in origins else [o for name, o in origins.items() if name.startswith(key + ".")]
    span = min((origin.span for origin in inside if origin.span is not None), default=None)
    if span is None:
        return Value(said, default=True, value=plain(value))
    return Value(said, written, f"{span.path}:{span.line}", value=plain(value))


@dataclass(frozen=True, slots=True)
class Side:
    """What was named on the command line; `what` says what it is."""

    label: str
    what: str
    schedule: Schedule


@dataclass(frozen=True, slots=True)
class Found:
    a: Side
    b: Side
    difference: Difference


@command()
def diff(
    a: str = argument("A"),
    b: str = argument("B"),
    as_json: Json = False,
    plot_file: plot.PlotFile = None,
    x: str | None = option(
        "--x",
        "With --plot: what the x axis counts.  [default: epochs]",
        type=click.Choice(("iterations", "epochs", "images")),
    ),
    scale: plot.Scale = None,
) -> None:
    """Shows in what two schedules differ: by stage and field, with the places.

    A and B are each a schedule's folder, the output folder of a run (what its stages were trained from), or a snapshot's.
    What differs and changes no training (paths, intervals) is shown apart, --plot draws both learning rates. The exit code is 0
    whether they differ or not; --json has `same`.
    """
    plot.check(plot_file, x, scale)
    found = compare(a, b)
    show(diff_json(found) if as_json else diff_text(found))
    if plot_file is not None:
        plot.write(plot_file, overlay(found), x, scale)


def compare(a: str, b: str) -> Found:
    """RecipeError, UsageError, ResumeRefused for a recipe that can't be read, StorageError, PermissionDenied."""
    one, other = _side(a), _side(b)
    return Found(one, other, difference(one.schedule, other.schedule))


# -- what is compared


def _side(folder: str) -> Side:
    path = Path(folder)
    if os.path.exists(path / SCHEDULE_FILE) or not os.path.isdir(path):
        return Side(folder, "a schedule", load(folder))
    real = path.resolve()
    if os.path.exists(path / MANIFEST) and store.parse_name(real.name) is not None:
        return Side(folder, "a snapshot", _of_snapshot(real))
    inventory = store.inventory(DISK, path)
    newest = newest_snapshot(inventory)
    if newest is None:
        raise UsageError(
            f"{folder} is neither a schedule's folder ({SCHEDULE_FILE}) nor that of a run with a snapshot",
            "give two folders, each of a schedule, of a run (OUT), or of a snapshot (OUT/snapshots/NAME)",
        )
    return Side(folder, "a run", _of_run(path, inventory, newest))


def _of_run(out: Path, inventory: Inventory, newest: SnapshotRef) -> Schedule:
    """What each stage was trained from: the recipe of the newest snapshot, with each stage as its own newest snapshot has it. The
    two differ where a run was asked to keep a stage that had changed. What was the schedule's then is the stage's own where that has
    changed since."""
    schedule = _recipe(
        newest.name, newest, store.read_file(DISK, snapshots_folder(out) / newest.name, RECIPE, MOST_RECIPE)[1]
    )
    stages = []
    for stage in schedule.stages:
        own = max(inventory.of(stage.name), key=lambda ref: (ref.attempt, ref.serial, ref.iter), default=None)
        if own is None:
            stages.append(stage)
            continue
        trained = _recipe(
            own.name, own, store.read_file(DISK, snapshots_folder(out) / own.name, RECIPE, MOST_RECIPE)[1]
        )
        # Where it starts from is as it is now: its parent may have another name than then.
        then = trained.stage(stage.name)
        model = then.solver.model if then.model == schedule.model else then.model
        solver = replace(then.solver, model=model)
        stages.append(replace(stage, solver=solver, identity=then.identity, model=then.model, data=then.data))
    return replace(schedule, stages=tuple(stages))


def _of_snapshot(folder: Path) -> Schedule:
    # Its tensors, which may be large, need not be read.
    ref, text = store.read_file(DISK, folder, RECIPE, MOST_RECIPE)
    return _recipe(folder.name, ref, text)


def _recipe(name: str, ref: SnapshotRef, data: bytes) -> Schedule:
    try:
        found = read_foreign(data.decode())
    except ValueError as error:
        version = ref.environment.get("stagerun", "another version")
        raise ResumeRefused(
            f"the recipe in snapshot {name} can't be read: {error}",
            f"it was written by stagerun {version}: use that one",
        ) from error
    # Of its identity nothing else is needed: the rest is in the recipe.
    code = {key: text for key, text in ref.identity.items() if key.startswith(CODE)}
    return replace(found, stages=tuple(replace(s, identity=code) if s.name == ref.stage else s for s in found.stages))


# -- text


def diff_text(found: Found) -> str:
    """Identical schedules take one line."""
    a, b, differs = found.a, found.b, found.difference
    lines = [f"A  {a.label} ({a.what})", f"B  {b.label} ({b.what})"]
    trains = [f for f in differs.fields if f.trains]
    others = [f for f in differs.fields if not f.trains]
    blocks = ["\n".join(lines)]
    if only := [*(f"{name}: only in A" for name in differs.only_a), *(f"{name}: only in B" for name in differs.only_b)]:
        blocks.append("\n".join(only))
    blocks += _by_stage(trains)
    if others:
        blocks.append("what changes no training:")
        blocks += _by_stage(others)
    blocks.append(verdict(differs, bool(trains or differs.only_a or differs.only_b)))
    return "\n\n".join(blocks)


def verdict(differs: Difference, visible: bool) -> str:
    """Whether they train the same. `visible`: something that trains differs, by name at least."""
    if not differs.same:
        return "they train different things"
    if visible:
        return "they train the same thing, under other names"
    return "they train the same thing" + ("" if differs.fields else ": nothing differs")


def _by_stage(fields: Iterable[FieldDifference]) -> Iterator[str]:
    """A block for what is shared, and for each stage, or several that differ alike."""
    alike: dict[tuple[str, Value, Value], list[str]] = {}
    for one in fields:
        alike.setdefault((one.field, one.a, one.b), []).append(one.stage)
    blocks: dict[str, list[str]] = {}
    for (name, a, b), stages in alike.items():
        blocks.setdefault(", ".join(stages), []).append(f"  {name}  {value_text(a)}  ->  {value_text(b)}")
    for title, lines in blocks.items():
        yield "\n".join([title or "the schedule", *lines])


def value_text(value: Value) -> str:
    where = [*([value.written] if value.written else []), *([value.place] if value.place else [])]
    where += ["a default"] if value.default else []
    return value.text + (f" ({', '.join(where)})" if where else "")


def overlay(found: Found) -> Picture:
    """Both as one picture: B's stages begin beside A's, and have lines of their own."""
    a, b = make_picture(found.a.schedule), make_picture(found.b.schedule)
    return Picture(f"A {a.name}, B {b.name}", (*_sided(a, "A"), *_sided(b, "B")))


def _sided(picture: Picture, side: str) -> Iterator[StagePicture]:
    for stage in picture.stages:
        parent = f"{side} {stage.parent}" if stage.parent is not None else None
        yield replace(stage, name=f"{side} {stage.name}", parent=parent, side=side)


def diff_json(found: Found) -> str:
    differs = found.difference
    record = {
        "a": {"folder": found.a.label, "what": found.a.what},
        "b": {"folder": found.b.label, "what": found.b.what},
        "same": differs.same,
        "only_a": list(differs.only_a),
        "only_b": list(differs.only_b),
        "fields": [asdict(field) for field in differs.fields],
    }
    return json.dumps(record, indent=2)
