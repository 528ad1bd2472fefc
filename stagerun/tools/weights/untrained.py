"""Weights from a file in a net of Caffe's or a stage's network, as `caffe test --model --weights` evaluates them: no run has trained them
here."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import Problems, RecipeError, UsageError, listing
from stagerun.base.recipe import Schedule, Stage, Weights
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count
from stagerun.base.weights import COUNTER
from stagerun.base.wings import require_wing
from stagerun.engine.codec import encode
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import quoted
from stagerun.language.view import View
from stagerun.models import build
from stagerun.tools.weights.stored import Stored
from stagerun.train.progress import WEIGHTS
from stagerun.train.starting_weights import fill
from stagerun.train.transfer import Origin, some


def stored_weights(what: str, overrides: Sequence[str], stage: str | None, weights: str, data: str | None) -> Stored:
    """The weights as a snapshot's. `what`: a net's file, whose data layers say images and transform, or a schedule's folder, of which the
    `stage` does. UsageError, RecipeError, DataError."""
    if os.path.isdir(what):
        schedule = load(what, overrides)
        found = _stage(schedule, stage)
    elif overrides or stage is not None:
        raise UsageError("--set and --stage belong to a schedule's folder", "leave them out")
    else:
        schedule = _of_net(Path(what), data)
        (found,) = schedule.stages
    start = Weights(file=weights, path=os.path.abspath(weights), strict=False)
    found = replace(found, parent=None, solver=replace(found.solver, weights=start, solverstate=None), identity={})
    live = dict(build(found.model).state_dict())
    try:
        made = fill(schedule, found, live, None)
    except RecipeError as error:  # of a line that no one has written
        raise UsageError(f"{weights}: {error.problems[0].message}", "name weights of this network") from None
    missing = [row.name for row in made.rows if row.origin is not Origin.FILE and not row.name.endswith(COUNTER)]
    if missing:
        text = f"{weights} lacks {some(missing)}, so random numbers would be evaluated"
        raise UsageError(text, "name weights of this network")
    ref = SnapshotRef(name=Path(weights).name, stage=found.name, iter=0, attempt=1, id="", parent="")
    return Stored(ref, {WEIGHTS: encode(live)}, schedule, found)


def _stage(schedule: Schedule, name: str | None) -> Stage:
    names = [stage.name for stage in schedule.stages]
    if name in names or (len(names) == 1 and name is None):
        return schedule.stage(name or names[0])
    text = f"--weights: {schedule.name} has {count(len(names), 'stage')}"
    raise UsageError(text, f"name one with --stage: {listing(names)}")


def _of_net(path: Path, data: str | None) -> Schedule:
    """A schedule of one stage with the net. Its LMDB is relative to the working folder, as in Caffe, or beside the net."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{path} can't be read: {error.strerror}", "name a net's .prototxt or a schedule's folder"
        ) from None
    problems = Problems([(str(path), text.decode(errors="replace"))])
    if (net := require_wing("caffe.text.read")(text, str(path), problems)) is None:
        raise RecipeError(problems.all())
    readers = net.readers("TEST", "TRAIN")
    named = (View(one).inside("data_param").text("source") for one in readers if View(one).text("type") == "Data")
    source = data or next(filter(None, named), None)
    if source is None:
        raise UsageError(f"{path} has no Data layer that names an LMDB", "name its folder with --data")
    lmdb = next((os.path.abspath(place) for place in (Path(source), path.parent / source) if place.exists()), None)
    if lmdb is None:
        raise UsageError(f"{path}: its images, {source}, are not here", "name their LMDB with --data")
    schedule = f"""name: "net" model {{ caffe_net: {quoted(path.name)} }} stage {{ name: "net" solver_param {{ }} }}
        data {{ train {{ source: {quoted(lmdb)} }} val {{ source: {quoted(lmdb)} }} }}
        solver {{ base_lr: 1 lr_policy: "fixed" max_iter: 1 }}"""
    return load(path.parent, (), {SCHEDULE_FILE: schedule.encode()})
