"""A resolved schedule as one text, and the digest of what its snapshots depend on. Pure."""

import dataclasses
import enum
import hashlib
import json
from typing import Any

from stagerun import recipe
from stagerun.spec.tree import quoted

# Fields of recipe that have another name, or stand elsewhere, in the language.
NAMES = {
    "transform": "transform_param",
    "test_transform": "test_transform_param",
    "random_aspect_ratio": "random_aspect_ratio_param",
    "random_resize": "random_resize_param",
    "random_resized_crop": "random_resized_crop_param",
    "color_jitter": "color_jitter_param",
    "rand_augment": "rand_augment_param",
    "crop_size_ramp": "crop_size_ramp_param",
}


def canonical(schedule: recipe.Schedule) -> str:
    """Everything that the schedule says, defaults spelt out, durations in iterations, one block per stage. Equal
    schedules have equal texts, on every machine that has the folder at the same path. What is not set is left out.
    """
    lines = [f"name: {quoted(schedule.name)}", f"seed: {schedule.seed}"]
    lines += _field("model", schedule.model) + _field("data", schedule.data)
    lines += [f"determinism: {schedule.determinism.value}", f"keep_snapshots: {schedule.keep_snapshots}"]
    for stage in schedule.stages:
        lines += ["stage {", f"  name: {quoted(stage.name)}", f"  from: {quoted(stage.parent or '')}"]
        for name in ("parent_iter", "enabled", "group", "solver"):
            lines += [f"  {line}" for line in _field(name, getattr(stage, name))]
        lines += ["}"]
    for ensemble in schedule.ensembles:
        lines += ["ensemble {", f"  name: {quoted(ensemble.name)}"]
        lines += [f"  members: {quoted(member)}" for member in ensemble.members]
        lines += [f"  rule: {ensemble.rule.value}", f"  batch_norm_iter: {ensemble.batch_norm_iter}", "}"]
    return "\n".join(lines) + "\n"


def _field(name: str, value: Any) -> list[str]:
    """The lines of one field; none for a value that is not set."""
    if value is None:
        return []
    if isinstance(value, tuple):
        return [line for item in value for line in _field(name, item)]
    if dataclasses.is_dataclass(value):
        lines = [f"{name} {{"]
        for field in dataclasses.fields(value):
            if field.name == "spare_classes":  # it only says what `run` lets pass
                continue
            lines += [f"  {line}" for line in _field(NAMES.get(field.name, field.name), getattr(value, field.name))]
        return [*lines, "}"]
    return [f"{name}: {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return str(value.value)
    return quoted(value) if isinstance(value, str) else repr(value)


def digest(schedule: recipe.Schedule) -> str:
    """sha256, in hex, of what training depends on: the settings of each stage that snapshots are made from, in running
    order, and which stage and iteration of it each starts from. Names of stages, paths and what is only looked at are not in it.
    """
    place = {stage.name: number for number, stage in enumerate(schedule.stages)}
    made_from = [
        [None if stage.parent is None else place[stage.parent], sorted(stage.identity.items())]  # has the iteration
        for stage in schedule.stages
    ]
    return hashlib.sha256(json.dumps(made_from, separators=(",", ":")).encode()).hexdigest()
