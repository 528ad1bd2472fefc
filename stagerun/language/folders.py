"""What is wrong with the images that are on this machine, by their class folders and the classes that LMDBs name: as `check` does, a look."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from stagerun.base import recipe
from stagerun.base.errors import Problem, Problems, RecipeError, Span, StagerunError
from stagerun.language.rules.model import classes_problem
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import class_names


def require_folders(schedule: recipe.Schedule) -> None:
    """RecipeError with all that is wrong with them, `num_classes` among it; nothing where there are none."""
    problems = look_at_folders(schedule)
    if problems or schedule.imports:
        problems += look_at_classes(schedule)
    if problems:
        raise RecipeError(problems)


def look_at_classes(schedule: recipe.Schedule) -> list[Problem]:
    """`classes_problem` for the LMDBs that are on this machine."""
    named = {source.path: class_names(source.path) for source in schedule.sources}
    found: dict[str, Problem] = {}
    for stage in schedule.stages:
        here = [(s.path, named[s.path]) for s in (stage.data.train, *stage.data.val) if s.path in named]
        most = max(here, key=lambda pair: len(pair[1]), default=None)
        problem = classes_problem(schedule, stage, *most) if most is not None else None
        if problem is not None:
            found.setdefault(problem.message, problem)
    return list(found.values())


def look_at_folders(schedule: recipe.Schedule) -> list[Problem]:
    """What `run` refuses about sources that are folders of class folders, each with its place."""
    problems = Problems(schedule.files)
    counts: dict[str, int | None] = {}  # of images, by path; None where they can't be counted
    for stage, field, source in _sources(schedule):
        path = source.path
        if path not in counts and is_class_folder(path):
            counts[path] = None
            try:
                made = schedule.imports.get(path)
                counts[path] = made.images if made is not None else len(small(path).names)
            except StagerunError as error:
                problems.add(_place(stage, field, "source"), error.message, error.hint)
        count = counts.get(path)
        if count is not None and count != source.images:
            text = f"`images` is {source.images}, but {path} has {count} images"
            problems.add(_place(stage, field, "images"), text, f"write `images: {count}`, or leave it out")
        if path in counts and source.labels is not None:
            text = f"`labels` name the records of an LMDB, and {path} is a folder whose class folders are the labels"
            hint = f"remove it, or make the LMDB first: stagerun data import {path} LMDB"
            problems.add(_place(stage, field, "labels"), text, hint)
        train = stage.data.train.path
        if field != "data.train" and (train in counts or path in counts):
            trained, tested = class_names(train), class_names(path)
            if trained and tested and trained != tested:
                hint = "give both the same class folders: labels count them in the order of their names"
                problems.add(_place(stage, field, "source"), _difference(train, trained, path, tested), hint)
    return list(problems.all())


def _sources(schedule: recipe.Schedule) -> Iterator[tuple[recipe.Stage, str, recipe.Source]]:
    """(stage, field, source) of the enabled stages: `data.train`, `data.val`, of another validation set `data.val.NAME`."""
    for stage in schedule.stages:
        if stage.enabled:
            yield stage, "data.train", stage.data.train
            for number, val in enumerate(stage.data.val):
                yield stage, f"data.val.{val.name}" if number else "data.val", val


def _place(stage: recipe.Stage, field: str, name: str) -> Span:
    """Where a field of a Source is written; else where its `source` is."""
    return stage.written(f"{field}.{name}", f"{field}.source") or stage.span


def _difference(train: str, trained: Sequence[str], val: str, tested: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(trained, tested))
    label, (one, other) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
    what = [f"`{name}`" if name is not None else "no class" for name in (one, other)]
    return f"label {label} is {what[0]} in {train}, and {what[1]} in {val}"
