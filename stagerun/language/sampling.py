"""How often classes come and how much they weigh: errors of meaning, and the weights in `sampling_file`. Pure, but for the reader that
is passed in."""

import hashlib
import posixpath
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from stagerun.base import recipe
from stagerun.base.errors import Problems, Span
from stagerun.base.text import count, first
from stagerun.language import values
from stagerun.language.code import Reader, Unreadable
from stagerun.language.parse import LARGEST
from stagerun.language.tree import Block
from stagerun.language.view import Doubtful, View

_WORD = re.compile(r"[^\s#]+")
_WEIGHT = re.compile(r"\d{1,15}(\.\d{1,15})?")
_LINE = "a line is `CLASS WEIGHT`, the number of a class and how often its images come in proportion: `3 0.5`"
_SHOWN = 5
_SHOWN_WHOLE = 16


def check_sampling(view: View, classes: int | None, shuffle: bool, problems: Problems) -> None:
    """Reports what is wrong in one stage's settings. `classes`: those of the schedule's network, None where they are not known."""
    classes = _classes(view, classes)
    with suppress(Doubtful):
        loss = view.view("loss")
        kind = loss.text("type") if loss is not None else None
        if kind not in (None, "SOFTMAX") and view.numbers("class_weight"):
            message = f"`class_weight` weighs cross entropy, and loss `{kind}` has no use for it"
            problems.add(view.place("class_weight"), message, "remove it, or `loss`")
    with suppress(Doubtful):
        _class_weight(view, classes, problems)
    with suppress(Doubtful):
        how = view.text("sampling")
        if how == "FILE" and not view.has("sampling_file"):
            hint = 'write `sampling_file: "weights.txt"` beside it, a file with a line `CLASS WEIGHT` for each class'
            problems.add(view.place("sampling"), "`sampling: FILE` needs `sampling_file`", hint)
        if how != "UNIFORM" and not shuffle:
            message = f"`sampling: {how}` draws an order of its own, and `shuffle` is false"
            problems.add(view.place("sampling"), message, "remove `shuffle: false` from `data`, or `sampling` here")


def _classes(view: View, shared: int | None) -> int | None:
    """The number of classes of the stage's own network, or of the `shared` one."""
    with suppress(Doubtful):
        own = view.view("model")
        return own.whole("num_classes") if own is not None else shared
    return None


def _class_weight(view: View, classes: int | None, problems: Problems) -> None:
    weights = view.numbers("class_weight")
    if not weights:
        return
    place = view.place("class_weight")
    if classes is not None and len(weights) != classes:
        message = f"{count(len(weights), 'value')} of `class_weight`, and `num_classes` is {classes}"
        problems.add(place, message, f"give {classes}, one for each class in the order of their numbers")
    if not any(weights):
        problems.add(place, "`class_weight` is 0 for every class: nothing is learned", "give some class more than 0")


# -- the file


def read_weights(
    settings: Mapping[str, Block], classes: int | None, read: Reader, shown: str, problems: Problems
) -> dict[tuple[str, int | None], tuple[float, ...]]:
    """The weights in each `sampling_file` that a stage draws by, by its name as written and the stage's number of classes. A file that
    has mistakes is not among them."""
    found: dict[tuple[str, int | None], tuple[float, ...]] = {}
    seen = set()
    for block in settings.values():
        with suppress(Doubtful):
            view = View(block)
            name = view.text("sampling_file") if view.text("sampling") == "FILE" else None
            own = _classes(view, classes)
            if name is not None and (name, own) not in seen:
                seen.add((name, own))
                place = view.place("sampling_file")
                text = _text(name, place, read, shown, problems)
                path = posixpath.join(shown, name)
                weights = _weights(path, text, own, place, problems) if text is not None else ()
                found |= {(name, own): weights} if weights else {}
    return found


def applied(schedule: recipe.Schedule, weights: Mapping[tuple[str, int | None], tuple[float, ...]]) -> recipe.Schedule:
    """The schedule with those weights in the stages that draw by them, and in what their snapshots depend on."""
    return replace(schedule, stages=tuple(_weighted(stage, weights) for stage in schedule.stages))


def _weighted(stage: recipe.Stage, weights: Mapping[tuple[str, int | None], tuple[float, ...]]) -> recipe.Stage:
    solver = stage.solver
    if solver.sampling is not recipe.Sampling.FILE or solver.sampling_file is None:
        return stage
    own = weights[solver.sampling_file, stage.model.num_classes]
    # Of few classes the weights themselves, which can be read in `plan --why` and in what is said of a change.
    text = values.text(own)
    if len(own) > _SHOWN_WHOLE:
        text = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    origin = replace(stage.origins["solver.sampling_file"], text=text)
    return replace(
        stage,
        solver=replace(solver, sampling_weight=own),
        identity={**stage.identity, recipe.SAMPLING_WEIGHT: text},
        origins={**stage.origins, recipe.SAMPLING_WEIGHT: origin},
    )


def _text(name: str, place: Span, read: Reader, shown: str, problems: Problems) -> str | None:
    if name.startswith(("/", "~")) or ".." in name.split("/"):
        hint = "copy the file beside schedule.prototxt, or below it: it travels with the folder"
        problems.add(place, f"`{name}` is not below the schedule's folder", hint)
        return None
    text = read(name)
    path = posixpath.join(shown, name)
    if isinstance(text, Unreadable):
        problems.add(place, f"{path}: {text.reason}", "a path starts at the folder of schedule.prototxt")
        return None
    if len(text) > LARGEST:
        problems.add(place, f"{path} is larger than {LARGEST} bytes", "it has a line for each class")
        return None
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _weights(path: str, text: str, classes: int | None, place: Span, problems: Problems) -> tuple[float, ...]:
    """The weights by class; () with mistakes. `place`: where the file is named."""
    problems.file(path, text)
    found: dict[int, float] = {}
    lines: dict[int, int] = {}
    known = len(problems.all())
    for number, line in enumerate(text.splitlines(), 1):
        words = list(_WORD.finditer(line.partition("#")[0]))
        if not words:
            continue
        spans = [Span(path, number, word.start() + 1, len(word[0])) for word in words]
        label, weight = words[0][0], words[1][0] if len(words) > 1 else ""
        if len(words) > 2:
            problems.add(spans[2], f"`{words[2][0]}` is a third word", _LINE)
        elif not (label.isascii() and label.isdecimal() and len(label) < 10):
            problems.add(spans[0], f"`{label}` is not the number of a class", _LINE)
        elif not _WEIGHT.fullmatch(weight):
            said = f"`{weight}` is not a weight" if weight else f"class {label} has no weight"
            problems.add(spans[-1], said, _LINE if not weight else "write a number of 0 or more, as 2 or 0.25")
        elif classes is not None and int(label) >= classes:
            problems.add(spans[0], f"there is no class {label}: `num_classes` is {classes}", "classes count from 0")
        elif int(label) in lines:
            problems.add(spans[0], f"class {label} a second time", f"its first line is {lines[int(label)]}; remove one")
        else:
            found[int(label)], lines[int(label)] = float(weight), number
    if classes is None or len(problems.all()) > known:
        return ()
    if missing := [str(c) for c in range(classes) if c not in found]:
        named = ", ".join(first(missing, _SHOWN))
        message = f"{path} has no line for class{'es' * (len(missing) > 1)} {named}"
        problems.add(place, message, f"write `{missing[0]} 0` to leave it out, or a weight")
        return ()
    if not any(found.values()):
        problems.add(place, f"{path} gives every class the weight 0: there is nothing to draw", "give some class more")
        return ()
    return tuple(found[c] for c in range(classes))
