"""What can be known of a schedule's images before anything is started: its LMDBs are opened, and some records of each looked at."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache

from stagerun.base.errors import DataError, Problem, RecipeError
from stagerun.base.nets import ignored_in
from stagerun.base.recipe import Cache, Schedule, Source, Stage
from stagerun.data.loader import LoaderOptions, together
from stagerun.data.loaders import evaluation_loader, training_loader
from stagerun.data.pictures import Decoded, make_memory
from stagerun.data.python_transform import PythonTransform
from stagerun.data.records import LmdbSource, Records
from stagerun.language import require_folders
from stagerun.language.rules.model import classes_problem
from stagerun.system.imports import is_there


def preflight(schedule: Schedule) -> None:
    """Opens the LMDBs where they are and looks at some records; looks at the folders that are still to be imported. DataError, RecipeError.

    Not whether `cache: DEVICE` has room: the device is the workers' matter, who look at it first thing.
    """
    require_folders(schedule)
    there = [s for s in schedule.sources if s.path not in schedule.imports or is_there(schedule.imports[s.path])]
    records = opened(schedule, there)
    kept = Cache.DISK if schedule.data.cache is Cache.DEVICE else schedule.data.cache
    memory = cache(lambda path: make_memory(records[path], schedule.model.channels, kept))
    require_usable(schedule, records, lambda stage: memory(stage.data.train.path))


def opened(schedule: Schedule, sources: Iterable[Source] | None = None) -> dict[str, Records]:
    """The LMDBs of these sources, or of all of the enabled stages, where they are, by the sources' paths. DataError, StorageError."""
    wanted = schedule.sources if sources is None else sources
    return {source.path: LmdbSource(schedule.lmdb(source), source.images) for source in wanted}


def require_usable(
    schedule: Schedule,
    records: Mapping[str, Records],
    memory: Callable[[Stage], Decoded | None],
    python: Callable[[Stage], PythonTransform | None] | None = None,
) -> None:
    """Looks at some records of each LMDB, by path, as each stage would. RecipeError where `num_classes` is wrong and nothing else is,
    DataError with all that is wrong. `memory`: where decoded training images stay. `python`:
    a stage's own function, imported; None: none is, and what one would change is not looked at."""
    mistakes: list[DataError] = []
    problems: dict[str, Problem] = {}  # by their messages
    known: list[tuple[object, ...]] = []  # hundreds of stages take their images alike
    for stage in schedule.stages:
        sources = stage.data.train, *stage.data.val
        if not all(source.path in records for source in sources):
            continue
        train, *vals = [records[source.path] for source in sources]
        seen, classes = stage, _classes([train, *vals])
        if (problem := classes_problem(schedule, stage, *classes)) is not None:
            problems.setdefault(problem.message, problem)
            # That each label is out of range then needs no saying.
            seen = replace(stage, model=replace(stage.model, num_classes=len(classes[1])))
        mistakes += filter(None, (_other_classes(train, val) for val in vals))
        if (way := _way(seen)) in known:
            continue
        if not stage.solver.transform.crop_size_ramp:  # which its other settings decide, too
            known.append(way)
        try:  # what is done to colours fails for no image, and is left out: it needs torch
            function = python(stage) if python is not None else None
            if function is not None or not stage.solver.transform.python:
                options = LoaderOptions(memory=memory(stage))
                loader = training_loader(train, schedule, seen, python=function, options=options)
                mistakes += (_placed(one, stage, "transform_param") for one in loader.mistakes())
        except DataError as error:
            mistakes.append(error)
        for val, source in zip(vals, stage.data.val, strict=True):
            try:
                loader = evaluation_loader(val, seen, numbered=source.labels is not None)
                mistakes += (_placed(one, stage, "test_transform_param") for one in loader.mistakes())
            except DataError as error:
                mistakes.append(error)
    if problems and not mistakes:
        raise RecipeError(list(problems.values()))
    mistakes[:0] = [DataError(replace(problem, hint="").render(), problem.hint) for problem in problems.values()]
    if mistakes:
        raise together(mistakes)


def _way(stage: Stage) -> tuple[object, ...]:
    """All that a stage's loaders depend on, but for the progress of a ramp."""
    solver = stage.solver
    transforms = solver.transform, solver.test_transform, solver.test_batch_size
    drawn = solver.random_seed, solver.sampling
    return stage.data, stage.model, *transforms, *drawn, ignored_in(stage)


def _placed(mistake: DataError, stage: Stage, transform: str) -> DataError:
    """The mistake, whose hint says where the setting that it names is written."""
    for field in ("model.num_classes", f"solver.{transform}.crop_size", "solver.transform_param.crop_size"):
        name, span = f"`{field.rpartition('.')[2]}`", stage.written(field)
        if name in mistake.hint and span is not None:
            place = f"{name} ({span.path}:{span.line})"
            return DataError(mistake.message, mistake.hint.replace(name, place, 1))
    return mistake


def _classes(records: Iterable[Records]) -> tuple[str, tuple[str, ...]]:
    """(LMDB, its classes) of the one that names most."""
    known = [(r.name, r.index.facts.classes if r.index else ()) for r in records]
    return max(known, key=lambda pair: len(pair[1]))


def _other_classes(train: Records, val: Records) -> DataError | None:
    """Where the side files name the classes, and one label means two things: accuracy would be that of a wrong answer."""
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
