"""A file with the labels of images that have several: a line for each record, its key and then its classes. Pure."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stagerun.base.errors import Problems, Span
from stagerun.base.recipe import FLOAT_DATA
from stagerun.language.code import Text, Unreadable
from stagerun.language.lexer import shown
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View

MOST = 200_000_000  # bytes of a file
_MOST_PROBLEMS = 20  # of a file that are told
_EXAMPLE = "a line is the key of a record and the numbers of its classes: `00000007 3 14`"


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
        key, _, rest = line.partition("\t" if "\t" in line else " ")
        if key in seen:
            yield WrongLine(number, 1, len(key), f"`{shown(key)}` stands in line {seen[key]}, too", "keep one of them")
        seen.setdefault(key, number)
        classes: list[int] = []
        column = len(key) + 2
        for word in rest.replace("\t", " ").split(" "):
            if word and not (word.isascii() and word.isdigit() and len(word) < 10):
                yield WrongLine(number, column, len(word), f"`{shown(word)}` is not the number of a class")
            elif word and int(word) >= num_classes:
                text = f"class {word} of `{shown(key)}`: there are classes 0 to {num_classes - 1}"
                yield WrongLine(number, column, len(word), text, "or change `num_classes`")
            elif word:
                classes.append(int(word))
            column += len(word) + 1
        yield key, tuple(classes)


def check(
    schedule: View,
    settings: Mapping[str, Block],
    read: Callable[[str], Text],
    path: Callable[[str], str],
    problems: Problems,
) -> dict[str, str]:
    """The digests of the files with labels, by their names as written. Reports what is wrong with them, and with stages that can't
    learn several labels. `path`: a file as the user would write it."""
    found: dict[str, str] = {}
    with contextlib.suppress(Doubtful):
        shared, classes = schedule.inside("data"), schedule.inside("model").whole("num_classes")
        owns = [own for block in settings.values() if (own := View(block).view("data")) is not None]
        models = [own for block in settings.values() if (own := View(block).view("model")) is not None]
        own_classes = [n for own in models if (n := own.whole("num_classes"))]
        listed = [view for data in (shared, *owns) for view in _sources(data)]
        for view in listed:
            file = view.text("labels") or ""
            if not view.has("labels") or file in found:
                continue
            if file == FLOAT_DATA:  # the records' own, which are part of the set of images
                found[file] = FLOAT_DATA
                continue
            place, text = view.place("labels"), read(file)
            if isinstance(text, Unreadable):
                problems.add(place, f"{path(file)}: {text.reason}", _EXAMPLE)
                continue
            found[file] = digest(text if isinstance(text, bytes) else text.encode())
            _check_file(path(file), text, max([*own_classes, classes or 1]), place, problems)
        without = [view for view in listed if not view.has("labels")]
        if without and len(without) < len(listed):
            text = "all sets of images have `labels`, or none of them has"
            problems.add(without[0].block.place, text, 'write `labels: "..."` here, too')
        if len(without) == len(listed):
            _refuse_map(settings, problems)
        else:
            _check_stages(settings, problems)
            for block in schedule.block.blocks("ensemble"):
                text = "an ensemble of networks for several labels: stagerun has no rule for that"
                problems.add(block.place, text, "remove it; `predict` gives the probabilities of each member")
    return found


def _sources(data: View) -> list[View]:
    train = data.view("train")
    return [*([train] if train is not None else []), *data.views("val")]


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


def _refuse_map(settings: Mapping[str, Block], problems: Problems) -> None:
    for block in settings.values():
        with contextlib.suppress(Doubtful):
            early = View(block).view("early_stop")
            if early is not None and early.text("metric") == "MAP":
                text = "`metric: MAP` is for images with several `labels`"
                problems.add(early.place("metric"), text, "write `metric: TOP1`")


def _check_stages(settings: Mapping[str, Block], problems: Problems) -> None:
    for name, block in settings.items():
        with contextlib.suppress(Doubtful):
            loss = View(block).view("loss")
            kind = loss.text("type") if loss is not None else "SOFTMAX"
            if kind not in ("BINARY", "PYTHON", None):
                where = loss.place("type") if loss is not None else block.place
                text = f"stage `{name}`: images have several `labels`, and loss `{kind}` takes one"
                problems.add(where, text, "write `loss { type: BINARY }`")
            if View(block).text("sampling") != "UNIFORM":
                text = f"stage `{name}`: images have several `labels`, and `sampling` goes by one"
                problems.add(View(block).place("sampling"), text, "remove it")
