"""Labels of images: files with several labels per image (a line for each record, its key and then its classes), class folders, and the
class names of LMDBs."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest

from stagerun.base import recipe
from stagerun.base.errors import Problem, Problems, RecipeError, Span, StagerunError
from stagerun.base.recipe import FLOAT_DATA
from stagerun.base.wings import ALL_COUNT, ignored_in
from stagerun.language.code import Text, Unreadable
from stagerun.language.lexer import shown
from stagerun.language.rules.images import sources
from stagerun.language.rules.model import classes_problem
from stagerun.language.tree import Block, Doubtful, View
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.image_sets import class_names, known

# -- files with several labels per image

MOST = 200_000_000  # bytes of a file
_MOST_PROBLEMS = 20  # reported for one file
_EXAMPLE = "a line is the key of a record and the numbers of its classes: `00000007 3 14`"
_WORD, _CLASS = re.compile(r"[^ \t]+"), re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class WrongLine:
    line: int
    column: int
    width: int
    message: str
    hint: str = _EXAMPLE


def digest(text: bytes) -> str:
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def parse(text: str, num_classes: int) -> Iterator[tuple[str, tuple[int, ...]] | WrongLine]:
    """Yield (key, classes) of each line; a line may have only a key. The key ends at the first tab, or without one at the first
    space. Lines that are empty, or begin with `#`, are skipped.

    >>> list(parse("# labels\\n7 3 1\\na b\\t2\\n8", 4))
    [('7', (3, 1)), ('a b', (2,)), ('8', ())]
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        key, classes = line.partition("\t" if "\t" in line else " ")[0], list[int]()
        if key in seen:
            yield WrongLine(number, 1, len(key), f"`{shown(key)}` is in line {seen[key]}, too", "keep one of them")
        seen.setdefault(key, number)
        for word in _WORD.finditer(line, len(key) + 1):
            position, name = (number, word.start() + 1, len(word[0])), shown(word[0])
            if not _CLASS.fullmatch(word[0]):
                yield WrongLine(*position, f"`{name}` is not the number of a class")
            elif int(word[0]) >= num_classes:
                text = f"class {name} of `{shown(key)}`: the classes are 0 to {num_classes - 1}"
                yield WrongLine(*position, text, "or change `num_classes`")
            else:
                classes.append(int(word[0]))
        yield key, tuple(classes)


def check(
    schedule: View,
    settings: Mapping[str, Block],
    read: Callable[[str], Text],
    path: Callable[[str], str],
    problems: Problems,
) -> dict[str, str]:
    """Return the digests of the files with labels, by their names as written; report their mistakes. `path`: a file as the user would write
    it."""
    digests: dict[str, str] = {}
    with suppress(Doubtful):
        holders = [schedule, *map(View, settings.values())]
        classes = max(view.inside("model").whole("num_classes") or 1 for view in holders)
        listed = [view for holder in holders for view in sources(holder.inside("data"))]
        marked = [view for view in listed if view.has("labels")]
        for view in marked:
            file, span = view.text("labels") or "", view.place("labels")
            if file in digests:
                continue
            if file == FLOAT_DATA:  # labels in the records, which are part of the set of images
                digests[file] = FLOAT_DATA
            elif isinstance(text := read(file), Unreadable):
                problems.add(span, f"{path(file)}: {text.reason}", _EXAMPLE)
            else:
                digests[file] = digest(text if isinstance(text, bytes) else text.encode())
                _check_file(path(file), text, classes, span, problems)
        without = [view for view in listed if not view.has("labels")]
        if marked and without:
            message = "some sets of images have `labels`, and this one doesn't"
            problems.add(without[0].block.place, message, 'write `labels: "..."` here, too')
    return digests


def _check_file(path: str, text: bytes | str, classes: int, span: Span, problems: Problems) -> None:
    if len(text) > MOST:
        problems.add(span, f"{path}: larger than {MOST} bytes")
        return
    try:
        lines = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError:
        problems.add(span, f"{path} is not UTF-8", _EXAMPLE)
        return
    wrong = [line for line in parse(lines, classes) if isinstance(line, WrongLine)]
    if wrong:
        problems.file(path, lines)
    for one in wrong[:_MOST_PROBLEMS]:
        problems.add(Span(path, one.line, one.column, one.width), one.message, one.hint)


# -- class folders, and the class names of LMDBs


def require_folders(schedule: recipe.Schedule) -> None:
    """Raise RecipeError with all mistakes about folders of class folders, and about `num_classes`."""
    problems = look_at_folders(schedule)
    if problems or schedule.imports:
        problems += look_at_classes(schedule)
    if problems:
        raise RecipeError(problems)


def look_at_classes(schedule: recipe.Schedule) -> list[Problem]:
    """Return `classes_problem` for the LMDBs on this machine; labels that no output has, and classes with another label in a validation set."""
    named = {source.path: class_names(source.path) for source in schedule.sources}
    last = cache(lambda path: max(chain(*known(path, "labels")[1]), default=-1))
    problems, others = dict[str, Problem](), Problems(schedule.files)
    for stage in schedule.stages:
        local = [(s.path, named[s.path]) for s in (stage.data.train, *stage.data.val) if s.path in named]
        most = max(local, key=lambda pair: len(pair[1]), default=None)
        problem = classes_problem(schedule, stage, *most) if most is not None else None
        if problem is not None:
            problems.setdefault(problem.message, problem)
    for stage, field, source in _sources(schedule):
        span, classes, trained = _span(stage, field, "source"), stage.model.num_classes, stage.data.train.path
        if not named.get(source.path) and source.labels is None and last(source.path) >= classes:
            hint = f"write `num_classes: {last(source.path) + 1}`, or import the images with labels 0 to {classes - 1}"
            text = f"{source.path} has images of label {last(source.path)}, and `num_classes` is {classes}"
            if ignored_in(stage) == ALL_COUNT:
                others.add(span, text, hint)
        pairs = list(zip(named.get(trained, ()), named.get(source.path, ()), strict=False))
        if any(one != other for one, other in pairs) and not is_class_folder(trained):
            text = _difference(trained, [one for one, _ in pairs], source.path, [other for _, other in pairs])
            others.add(span, text, "import both from the same class folders: labels count them by name")
    return [*problems.values(), *others.all()]


def look_at_folders(schedule: recipe.Schedule) -> list[Problem]:
    """Return the reasons for which `run` refuses sources that are folders of class folders."""
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
                problems.add(_span(stage, field, "source"), error.message, error.hint)
        count = counts.get(path)
        if count is not None and count != source.images:
            text = f"`images` is {source.images}, but {path} has {count} images"
            problems.add(_span(stage, field, "images"), text, f"write `images: {count}`, or leave it out")
        if path in counts and source.labels is not None:
            text = f"`labels` name the records of an LMDB, and {path} is a folder whose class folders are the labels"
            hint = f"remove it, or make the LMDB first: stagerun data import {path} LMDB"
            problems.add(_span(stage, field, "labels"), text, hint)
        train = stage.data.train.path
        if field != "data.train" and (train in counts or path in counts):
            trained, tested = class_names(train), class_names(path)
            if trained and tested and trained != tested:
                hint = "give both the same class folders: labels count them in the order of their names"
                problems.add(_span(stage, field, "source"), _difference(train, trained, path, tested), hint)
    return list(problems.all())


def _sources(schedule: recipe.Schedule) -> Iterator[tuple[recipe.Stage, str, recipe.Source]]:
    """Yield (stage, field, source) of the enabled stages: `data.train`, `data.val`, and `data.val.NAME` for further validation sets."""
    for stage in schedule.stages:
        if stage.enabled:
            yield stage, "data.train", stage.data.train
            for number, val in enumerate(stage.data.val):
                yield stage, f"data.val.{val.name}" if number else "data.val", val


def _span(stage: recipe.Stage, field: str, name: str) -> Span:
    """Return the span of a Source's field, else of its `source`."""
    return stage.written(f"{field}.{name}", f"{field}.source") or stage.span


def _difference(train: str, trained: Sequence[str], val: str, tested: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(trained, tested))
    label, (one, other) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
    what = [f"`{name}`" if name is not None else "no class" for name in (one, other)]
    return f"label {label} is {what[0]} in {train}, and {what[1]} in {val}"
