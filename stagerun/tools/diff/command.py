"""`stagerun diff`: two schedules, or a schedule and what a run was made from, beside each other."""

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from stagerun import store
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory, SnapshotRef
from stagerun.base.units import epochs
from stagerun.command.ending import show
from stagerun.command.options import argument, command, option
from stagerun.command.shared import Json, PlotFile, Scale
from stagerun.drawing.picture import Picture, StagePicture, make_picture
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stored import read_foreign
from stagerun.store.layout import MANIFEST
from stagerun.tools.diff.difference import Difference, FieldDifference, RateDifference, Value, difference
from stagerun.train.output import DISK, newest_snapshot
from stagerun.train.progress import MOST_RECIPE, RECIPE


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
    plot_file: PlotFile = None,
    x: str | None = option(
        "--x",
        "With --plot: what the x axis counts.  [default: epochs]",
        type=click.Choice(("iterations", "epochs", "images")),
    ),
    scale: Scale = None,
) -> None:
    """Shows in what two schedules differ: by stage and field, with the places, and where their learning rates part.

    A and B are each a schedule's folder, the output folder of a run (what its stages were trained from), or a snapshot's.
    What differs and changes no training (paths, intervals) is shown apart, --plot draws both learning rates. The exit code is 0
    whether they differ or not; --json has `same`.
    """
    picture = None
    if plot_file is not None or x or scale:
        from stagerun.tools.plan.plot import asked, draw_once

        picture = asked(file=plot_file, x=x, scale=scale, others=["--json"] * as_json)
    found = compare(a, b)
    show(diff_json(found) if as_json else diff_text(found))
    if picture is not None:
        draw_once(overlay(found), picture)


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
    newest = newest_snapshot(path, inventory)
    if newest is None:
        raise UsageError(
            f"{folder} is neither a schedule's folder ({SCHEDULE_FILE}) nor that of a run with a snapshot",
            "give two folders, each of a schedule, of a run (OUT), or of a snapshot (OUT/snapshots/NAME)",
        )
    return Side(folder, "a run", _of_run(path, inventory, newest))


def _of_run(out: Path, inventory: Inventory, newest: SnapshotRef) -> Schedule:
    """What each stage was trained from: the recipe of the newest snapshot, with each stage as its own newest snapshot has it. The
    two differ where a run was asked to keep a stage that had changed."""
    schedule = _recipe(newest.name, newest, store.read_file(DISK, out, newest.name, RECIPE, MOST_RECIPE))
    stages = []
    for stage in schedule.stages:
        own = max(inventory.of(stage.name), key=lambda ref: (ref.attempt, ref.serial, ref.iter), default=None)
        if own is None:
            stages.append(stage)
            continue
        trained = _recipe(own.name, own, store.read_file(DISK, out, own.name, RECIPE, MOST_RECIPE))
        # Where it starts from is as it is now: its parent may have another name than then.
        stages.append(replace(stage, solver=trained.stage(stage.name).solver))
    return replace(schedule, stages=tuple(stages))


def _of_snapshot(folder: Path) -> Schedule:
    # Its tensors, which may be large, need not be read.
    ref, text = store.read_file_of(DISK, folder, RECIPE, MOST_RECIPE)
    return _recipe(folder.name, ref, text)


def _recipe(name: str, ref: SnapshotRef, data: bytes) -> Schedule:
    try:
        return read_foreign(data.decode())
    except ValueError as error:
        version = ref.environment.get("stagerun", "another version")
        raise ResumeRefused(
            f"the recipe in snapshot {name} can't be read: {error}",
            f"it was written by stagerun {version}: use that one",
        ) from error


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
    if differs.rates:
        blocks.append("\n".join(["learning rate", *(f"  {_rate(found, rate)}" for rate in differs.rates)]))
    if others:
        blocks.append("what changes no training:")
        blocks += _by_stage(others)
    blocks.append(_verdict(differs, bool(trains or differs.only_a or differs.only_b)))
    return "\n\n".join(blocks)


def _verdict(differs: Difference, visible: bool) -> str:
    if not differs.same:
        return "they train different things"
    if visible:
        return "they train the same thing, under other names"
    if differs.reworded:
        fields = ", ".join(sorted(differs.reworded))
        return (
            f"they train the same thing, but snapshots of one are stale for the other, by how it is written: {fields}"
        )
    return "they train the same thing" + ("" if differs.fields else ": nothing differs")


def _by_stage(fields: Iterable[FieldDifference]) -> Iterator[str]:
    """A block for what is shared, and for each stage, or several that differ alike."""
    alike: dict[tuple[str, Value, Value], list[str]] = {}
    for field in fields:
        alike.setdefault((field.field, field.a, field.b), []).append(field.stage)
    blocks: dict[str, list[str]] = {}
    for (name, a, b), stages in alike.items():
        blocks.setdefault(", ".join(stages), []).append(f"  {name}  {_value(a)}  ->  {_value(b)}")
    for title, lines in blocks.items():
        yield "\n".join([title or "the schedule", *lines])


def _value(value: Value) -> str:
    where = [*([value.written] if value.written else []), *([value.place] if value.place else [])]
    where += ["a default"] if value.default else []
    return value.text + (f" ({', '.join(where)})" if where else "")


def _rate(found: Found, rate: RateDifference) -> str:
    schedule = found.a.schedule
    batch = schedule.stage(rate.stage).solver.batch_size
    epoch = epochs(rate.first, schedule.data.train.images, batch)
    where = "from the start" if rate.first == 0 else f"from iteration {rate.first} (epoch {epoch:.2f} of the stage)"
    factor = f" (x{rate.b / rate.a:.3g})" if rate.a else ""
    return f"{rate.stage}: {where}; most at {rate.most}: {rate.a:.4g} -> {rate.b:.4g}{factor}"


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
        "reworded": sorted(differs.reworded),
        "learning_rate": [asdict(rate) for rate in differs.rates],
    }
    return json.dumps(record, indent=2)
