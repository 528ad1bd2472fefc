"""Weights from a file in a net of Caffe's or in a stage's network, as `caffe test --model --weights` evaluates them."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stagerun.base.errors import RecipeError, UsageError, listing
from stagerun.base.recipe import Weights
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.weights import COUNTER
from stagerun.engine.codec import encode
from stagerun.language import load
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import quoted
from stagerun.models import build
from stagerun.tools.weights.snapshot import Stored
from stagerun.train.progress import WEIGHTS
from stagerun.train.starting_weights import fill
from stagerun.train.transfer import Origin


def stored_weights(what: str, overrides: Sequence[str], name: str | None, weights: str, data: str | None) -> Stored:
    """Return the weights in the form of a snapshot. `what`: a schedule's folder, whose stage `name` gives network and images, or a net's file,
    whose images are `data` or in its data layers. UsageError, RecipeError, DataError."""
    folder, edited = Path(what), dict[str, bytes]()
    if not folder.is_dir():
        path = quoted(os.path.abspath(data)) if data is not None else ""
        images = f"data {{ train {{ source: {path} }} val {{ source: {path} }} }}" if path else ""
        text = f'name: "net" model {{ caffe_net: {quoted(folder.name)} }} {images} stage {{ name: "net" solver_param {{ }} }}'
        edited = {SCHEDULE_FILE: (text + ' solver { base_lr: 1 lr_policy: "fixed" max_iter: 1 }').encode()}
        folder = folder.parent
    schedule = load(folder, overrides, edited)
    names = [stage.name for stage in schedule.stages]
    if (name or names[0]) not in names or (name is None and len(names) > 1):
        raise UsageError(f"--weights needs one stage of {schedule.name}", f"name it with --stage: {listing(names)}")
    stage = schedule.stage(name or names[0])
    start = Weights(file=weights, path=os.path.abspath(weights), strict=False)
    solver = replace(stage.solver, weights=start, solverstate=None)
    stage = replace(stage, parent=None, solver=solver, identity={})
    live = dict(build(stage.model).state_dict())
    try:
        rows = fill(schedule, stage, live, None).rows
    except RecipeError as error:  # its place would be a line of the text above
        raise UsageError(f"{weights}: {error.problems[0].message}", "name weights of this network") from None
    missing = [row.name for row in rows if row.origin is not Origin.FILE and not row.name.endswith(COUNTER)]
    if missing:
        text = f"{weights} lacks {listing(missing[:6], 'and')}, so random numbers would be evaluated"
        raise UsageError(text, "name weights of this network")
    ref = SnapshotRef(name=Path(weights).name, stage=stage.name, iter=0, attempt=1, id="", parent="")
    return Stored(ref, {WEIGHTS: encode(live)}, schedule, stage)
