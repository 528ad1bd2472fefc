"""What can be known of a schedule's images before anything is started: its LMDBs are opened, and some records of each looked at."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

from stagerun.base.errors import DataError, RecipeError, StagerunError
from stagerun.base.recipe import Cache, Data, OnBadRecord, Schedule, Stage
from stagerun.data.bad_records import BadRecords
from stagerun.data.loader import together
from stagerun.data.loaders import evaluation_loader, training_loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import LmdbSource, Records
from stagerun.data.scratch import copies_of
from stagerun.language.check_images import classes_problem


def preflight(schedule: Schedule) -> None:
    """Opens the LMDBs where they are and looks at some records. DataError, RecipeError.

    Not whether `cache: DEVICE` has room: the device is the workers' matter, who look at it first thing.
    """
    data = schedule.data
    try:
        train, val = opened(data)
    except DataError as error:
        raise DataError(error.message, _copies_left(data) or error.hint) from None
    kept = Cache.DISK if data.cache is Cache.DEVICE else data.cache
    memory = cache(lambda: make_memory(train, schedule.model.channels, kept))
    bad = BadRecords(data.train.images) if data.on_bad_record is OnBadRecord.REPLACE else None
    require_usable(schedule, train, val, memory, bad)


def opened(data: Data) -> tuple[Records, Records | None]:
    """The LMDBs of training and of validation, where they are. DataError, StorageError."""
    train = LmdbSource(data.train.path, data.train.images)
    return train, LmdbSource(data.val.path, data.val.images) if data.val is not None else None


def require_usable(
    schedule: Schedule,
    train: Records,
    val: Records | None,
    memory: Callable[[], Decoded | None],
    bad: BadRecords | None,
    python: Callable[[Stage], PythonTransform | None] | None = None,
) -> None:
    """Looks at some records of each LMDB as each stage would. RecipeError where `num_classes` is wrong and nothing else is, DataError
    with all that is wrong. `memory`: where decoded training images stay; `bad`: the replaced ones, as a Loader has them. `python`: a stage's
    own function, imported; None: none is, and what one would change is not looked at."""
    mistakes: list[DataError] = []
    if (other := _other_classes(train, val)) is not None:
        mistakes.append(other)
    lmdb, classes = _classes(train, val)
    seen, problem = schedule, classes_problem(schedule, lmdb, classes)
    if problem is not None:  # that each label is out of range then needs no saying
        stages = (replace(s, model=replace(s.model, num_classes=len(classes))) for s in schedule.stages)
        seen = replace(schedule, stages=tuple(stages))
    for stage in seen.stages:
        try:  # what is done to colours fails for no image, and is left out: it needs torch
            function = python(stage) if python is not None else None
            if function is not None or not stage.solver.transform.python:
                loader = training_loader(train, seen, stage, python=function, memory=memory(), bad=bad)
                mistakes += loader.mistakes()
        except DataError as error:
            mistakes.append(error)
        try:
            mistakes += evaluation_loader(val, stage).mistakes() if val is not None else []
        except DataError as error:
            mistakes.append(error)
    if problem is not None and not mistakes:
        raise RecipeError([problem])
    if problem is not None:
        mistakes.insert(0, DataError(replace(problem, hint="").render(), problem.hint))
    if mistakes:
        raise together(mistakes)


def _classes(train: Records, val: Records | None) -> tuple[str, tuple[str, ...]]:
    """(LMDB, its classes) of the one that names most."""
    known = [(r.name, r.index.facts.classes if r.index else ()) for r in (train, val) if r is not None]
    return max(known, key=lambda pair: len(pair[1]))


def _other_classes(train: Records, val: Records | None) -> DataError | None:
    """Where the side files name the classes, and one label means two things: accuracy would be that of a wrong answer."""
    if val is None or train.index is None or val.index is None:
        return None
    pairs = zip(train.index.facts.classes, val.index.facts.classes, strict=False)
    for label, (trained, tested) in enumerate(pairs):
        if trained != tested:
            return DataError(
                f"label {label} is `{trained}` in {train.name}, and `{tested}` in {val.name}",
                "labels count the class folders in the order of their names: import both from the same folders, or from lists "
                "that state the labels",
            )
    return None


def _copies_left(data: Data) -> str:
    """A hint at the copies of LMDBs that are gone themselves."""
    sources = [data.train, *([data.val] if data.val else [])]
    found = []
    for source in sources:
        if data.scratch is not None and not os.path.exists(source.path):
            with suppress(StagerunError):
                found += [(source.path, one) for one in copies_of(data.scratch, source.path)]
    return "; ".join(
        f"a copy of {path}, made {one.manifest.made}, is in {one.folder}: it can be given as `source`"
        for path, one in found
    )
