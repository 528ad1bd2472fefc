"""What is wrong with sources that are folders of class folders. Looks at the folders, as `check` does at LMDBs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from stagerun.base import recipe
from stagerun.base.errors import Problem, Problems, RecipeError, Span, StagerunError
from stagerun.language.resolve import look_at_classes
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import class_names


@dataclass(frozen=True, slots=True)
class _Place:
    """A Source of a stage. `field`: `data.train`, `data.val`, of another validation set `data.val.NAME`."""

    stage: recipe.Stage
    field: str
    source: recipe.Source

    def of(self, name: str) -> Span:
        """Where a field of it is written; else where its `source` is."""
        return self.stage.written(f"{self.field}.{name}", f"{self.field}.source") or self.stage.span


def look_at_folders(schedule: recipe.Schedule) -> list[Problem]:
    """What `run` refuses, each with its place."""
    problems = Problems(schedule.files)
    known: dict[str, tuple[tuple[str, ...], int] | None] = {}
    for place in _places(schedule):
        path = place.source.path
        if path in known:
            _check_counted(place, known[path], problems)
            continue
        if not is_class_folder(path):
            continue
        made = schedule.imports.get(path)
        try:
            found = small(path) if made is None else None
            known[path] = (made.classes, made.images) if made else (found.classes, len(found.names)) if found else None
        except StagerunError as error:
            problems.add(place.of("source"), error.message, error.hint)
            known[path] = None
            continue
        _check_counted(place, known[path], problems)
    for stage in schedule.stages if known else ():
        if stage.enabled:
            _check_classes(stage, known, problems)
    return list({(p.span, p.message): p for p in problems.all()}.values())


def require_folders(schedule: recipe.Schedule) -> None:
    """RecipeError with all that is wrong with them, `num_classes` among it; nothing where there are none."""
    problems = look_at_folders(schedule)
    if problems or schedule.imports:
        problems += look_at_classes(schedule)
    if problems:
        raise RecipeError(problems)


def _places(schedule: recipe.Schedule) -> Iterator[_Place]:
    for stage in schedule.stages:
        if stage.enabled:
            yield _Place(stage, "data.train", stage.data.train)
            for number, val in enumerate(stage.data.val):
                yield _Place(stage, f"data.val.{val.name}" if number else "data.val", val)


def _check_counted(place: _Place, found: tuple[tuple[str, ...], int] | None, problems: Problems) -> None:
    source = place.source
    if found is not None and found[1] != source.images:
        text = f"`images` is {source.images}, but {source.path} has {found[1]} images"
        problems.add(place.of("images"), text, f"write `images: {found[1]}`, or leave it out")
    if source.labels is not None:
        text = f"`labels` name the records of an LMDB, and {source.path} is a folder whose class folders are the labels"
        problems.add(
            place.of("labels"), text, f"remove it, or make the LMDB first: stagerun data import {source.path} LMDB"
        )


def _check_classes(
    stage: recipe.Stage, folders: dict[str, tuple[tuple[str, ...], int] | None], problems: Problems
) -> None:
    """A label must mean one class in training and validation, and count the same folders."""
    train = stage.data.train.path
    for number, val in enumerate(stage.data.val):
        if train not in folders and val.path not in folders:
            continue
        trained, tested = class_names(train), class_names(val.path)
        if trained and tested and trained != tested:
            place = _Place(stage, f"data.val.{val.name}" if number else "data.val", val)
            hint = "give both the same class folders: labels count them in the order of their names"
            problems.add(place.of("source"), _difference(train, trained, val.path, tested), hint)


def _difference(train: str, trained: Sequence[str], val: str, tested: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(trained, tested))
    label, (one, other) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
    what = [f"`{name}`" if name is not None else "no class" for name in (one, other)]
    return f"label {label} is {what[0]} in {train}, and {what[1]} in {val}"
