"""A file with the labels of images that have several: a line for each record, its key and then its classes. Pure."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from stagerun.base.errors import Problems, Span
from stagerun.base.recipe import FLOAT_DATA
from stagerun.language.code import Text, Unreadable
from stagerun.language.lexer import shown
from stagerun.language.rules.images import sources
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View

MOST = 200_000_000  # bytes of a file
_MOST_PROBLEMS = 20  # of a file that are told
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
    """(key, classes) of each line; one without classes has none of them. The key ends at the first tab, or without one at the
    first space. Lines that are empty, or begin with `#`, are passed over.

    >>> list(parse("# mine\\n7 3 1\\na b\\t2\\n8", 4))
    [('7', (3, 1)), ('a b', (2,)), ('8', ())]
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.rstrip("\r")
        if not line.strip() or line.startswith("#"):
            continue
        key, classes = line.partition("\t" if "\t" in line else " ")[0], list[int]()
        if key in seen:
            yield WrongLine(number, 1, len(key), f"`{shown(key)}` stands in line {seen[key]}, too", "keep one of them")
        seen.setdefault(key, number)
        for word in _WORD.finditer(line, len(key) + 1):
            place, name = (number, word.start() + 1, len(word[0])), shown(word[0])
            if not _CLASS.fullmatch(word[0]):
                yield WrongLine(*place, f"`{name}` is not the number of a class")
            elif int(word[0]) >= num_classes:
                text = f"class {name} of `{shown(key)}`: there are classes 0 to {num_classes - 1}"
                yield WrongLine(*place, text, "or change `num_classes`")
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
    """The digests of the files with labels, by their names as written. Reports what is wrong with them. `path`: a file as the user would
    write it."""
    found: dict[str, str] = {}
    with suppress(Doubtful):
        holders = [schedule, *map(View, settings.values())]
        classes = max(view.inside("model").whole("num_classes") or 1 for view in holders)
        listed = [view for holder in holders for view in sources(holder.inside("data"))]
        marked = [view for view in listed if view.has("labels")]
        for view in marked:
            file, place = view.text("labels") or "", view.place("labels")
            if file in found:
                continue
            if file == FLOAT_DATA:  # the records' own, which are part of the set of images
                found[file] = FLOAT_DATA
            elif isinstance(text := read(file), Unreadable):
                problems.add(place, f"{path(file)}: {text.reason}", _EXAMPLE)
            else:
                found[file] = digest(text if isinstance(text, bytes) else text.encode())
                _check_file(path(file), text, classes, place, problems)
        without = [view for view in listed if not view.has("labels")]
        if marked and without:
            message = "all sets of images have `labels`, or none of them has"
            problems.add(without[0].block.place, message, 'write `labels: "..."` here, too')
    return found


def _check_file(path: str, text: bytes | str, classes: int, place: Span, problems: Problems) -> None:
    if len(text) > MOST:
        problems.add(place, f"{path}: larger than {MOST} bytes")
        return
    try:
        lines = text if isinstance(text, str) else text.decode()
    except UnicodeDecodeError:
        problems.add(place, f"{path} is not UTF-8", _EXAMPLE)
        return
    wrong = [line for line in parse(lines, classes) if isinstance(line, WrongLine)]
    if wrong:
        problems.file(path, lines)
    for one in wrong[:_MOST_PROBLEMS]:
        problems.add(Span(path, one.line, one.column, one.width), one.message, one.hint)
