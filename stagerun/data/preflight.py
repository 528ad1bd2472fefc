"""Checks of a schedule's images before a run: its LMDBs are opened, and some records of each are decoded."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from stagerun.base.errors import DataError, Problem, RecipeError
from stagerun.base.recipe import Cache, Schedule, Source, Stage
from stagerun.base.wings import ignored_in
from stagerun.data.loader import LoaderOptions, PythonTransform, together
from stagerun.data.loaders import evaluation_loader, training_loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.records import LmdbSource, Records
from stagerun.language import require_folders
from stagerun.language.rules.model import classes_problem
from stagerun.system.imports import is_there


def preflight(schedule: Schedule) -> None:
    """Check some records of each LMDB, and the folders that are not imported yet. DataError, RecipeError.

    The workers check whether `cache: DEVICE` has room.
    """
    require_folders(schedule)
    ready = [s for s in schedule.sources if s.path not in schedule.imports or is_there(schedule.imports[s.path])]
    records = opened(schedule, ready)
    kept = Cache.DISK if schedule.data.cache is Cache.DEVICE else schedule.data.cache
    memory = cache(lambda path: make_memory(records[path], schedule.model.channels, kept))
    require_usable(schedule, records, lambda stage: memory(stage.data.train.path))


def opened(schedule: Schedule, sources: Iterable[Source] | None = None) -> dict[str, Records]:
    """Open the LMDBs of these sources, or of all enabled stages; return them by the sources' paths. DataError, StorageError."""
    wanted = schedule.sources if sources is None else sources
    return {source.path: LmdbSource(schedule.lmdb(source), source.images) for source in wanted}


def require_usable(
    schedule: Schedule,
    records: Mapping[str, Records],
    memory: Callable[[Stage], Decoded | None],
    python: Callable[[Stage], PythonTransform | None] | None = None,
) -> None:
    """Try some records of each LMDB, by path, as each stage would. RecipeError if only `num_classes` is wrong, else DataError with all
    mistakes. `memory` keeps decoded training images. `python` returns a stage's imported function; without it, images that a function
    changes are skipped."""
    mistakes: list[DataError] = []
    problems: dict[str, Problem] = {}  # by their messages
    checked: list[tuple[object, ...]] = []  # hundreds of stages may have the same loaders
    for stage in schedule.stages:
        sources = stage.data.train, *stage.data.val
        if not all(source.path in records for source in sources):
            continue
        train, *vals = [records[source.path] for source in sources]
        seen, classes = stage, _classes([train, *vals])
        if (problem := classes_problem(schedule, stage, *classes)) is not None:
            problems.setdefault(problem.message, problem)
            # The labels out of range need no other message.
            seen = replace(stage, model=replace(stage.model, num_classes=len(classes[1])))
        mistakes += filter(None, (_other_classes(train, val) for val in vals))
        if (settings := _settings(seen)) in checked:
            continue
        if not stage.solver.transform.crop_size_ramp:  # it depends on more settings
            checked.append(settings)
        try:  # changes of colours, which need torch, fail for no image and are omitted
            function = python(stage) if python is not None else None
            if function is not None or not stage.solver.transform.python:
                options = LoaderOptions(memory=memory(stage))
                loader = training_loader(train, schedule, seen, python=function, options=options)
                mistakes += loader.mistakes()
        except DataError as error:
            mistakes.append(error)
        for val, source in zip(vals, stage.data.val, strict=True):
            try:
                mistakes += evaluation_loader(val, seen, numbered=source.labels is not None).mistakes()
            except DataError as error:
                mistakes.append(error)
    if problems and not mistakes:
        raise RecipeError(list(problems.values()))
    mistakes[:0] = [DataError(replace(problem, hint="").render(), problem.hint) for problem in problems.values()]
    if mistakes:
        raise together(mistakes)


def _settings(stage: Stage) -> tuple[object, ...]:
    """Return all settings of a stage's loaders, except for the progress of a ramp."""
    solver = stage.solver
    transforms = solver.transform, solver.test_transform, solver.test_batch_size
    drawn = solver.random_seed, solver.sampling
    return stage.data, stage.model, *transforms, *drawn, ignored_in(stage)


def _classes(records: Iterable[Records]) -> tuple[str, tuple[str, ...]]:
    """Return (name, classes) of the LMDB that names most classes."""
    named = [(r.name, r.index.facts.classes if r.index else ()) for r in records]
    return max(named, key=lambda pair: len(pair[1]))


def _other_classes(train: Records, val: Records) -> DataError | None:
    """Return an error if the side files name different classes for one label: accuracy would be wrong."""
    if train.index is None or val.index is None:
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
