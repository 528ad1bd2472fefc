"""The text files around ImageNet: which synset is which label, and which validation image shows what.

Synsets: a line per class, in the order of the labels: `n01440764`, or `n01440764 tench, Tinca tinca` (Caffe's
synsets.txt, synset_words.txt; Kaggle's LOC_synset_mapping.txt).

Ground truth: `name synset` or `name label` per line in any order; one synset or one label per line, in the order of the
sorted file names; Kaggle's LOC_val_solution.csv. The devkit's ILSVRC2012_IDs, 1 to 1000, are neither, and are refused.

Mistakes in these files, and in other lists that come with images, are problems with places: the first 20 of a file at once.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from stagerun.base.errors import DataError, Problem, RecipeError, Span
from stagerun.tools.data.sources.archive import LARGEST_LABEL, read_text

MOST_MISTAKES = 20
_LONGEST_SHOWN = 200


def lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of all that isn't blank. Lines end in newlines alone: a name may hold any other character."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip(" \t\r")


def shown(text: str) -> str:
    """Without characters that a terminal would act upon, one for one."""
    text = text[:_LONGEST_SHOWN]
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


class Mistakes:
    """The mistakes in a file, each with its place. Those above MOST_MISTAKES are not shown."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._problems: list[Problem] = []

    def add(self, number: int, line: str, at: int, message: str, hint: str) -> None:
        """A problem with the word of a line that begins at index `at`. RecipeError if there are too many to go on."""
        width = len(line[at:].split(None, 1)[0]) if line[at:].strip() else 1
        span = Span(self._path, number, at + 1, width)
        if len(self._problems) < MOST_MISTAKES:
            self._problems.append(Problem(message, span, shown(line) if at < _LONGEST_SHOWN else "", hint))
            return
        more = f"more than {MOST_MISTAKES} mistakes; the rest is not shown"
        raise RecipeError([*self._problems, Problem(more, span, "", "is it such a list?")])

    def stop(self) -> None:
        """RecipeError if there are any."""
        if self._problems:
            raise RecipeError(self._problems)


_SYNSET = re.compile(r"n[0-9]{8}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_PLAIN = re.compile(r"(?P<synset>n[0-9]{8})([ \t]+(?P<words>.*))?")

_NO_IDS = "give a file that names synsets or Caffe's labels, such as Caffe's val.txt and synset_words.txt"


@dataclass(frozen=True, slots=True)
class Synsets:
    """`labels`: synset -> label."""

    labels: dict[str, int]
    classes: tuple[str, ...]  # the synset and its words: words alone are not unique (there are two cranes)


def read_synsets(path: str) -> Synsets:
    """RecipeError with every line that is none, or comes twice."""
    mistakes = Mistakes(path)
    names: dict[str, str] = {}
    for number, line in lines(read_text(path)):
        found = _PLAIN.fullmatch(line.strip())
        if found is None:
            message, hint = "not a synset, such as n01440764", "a line is `synset` or `synset words`"
            mistakes.add(number, line, 0, message, hint)
        elif found["synset"] in names:
            mistakes.add(number, line, 0, f"{found['synset']} stands here twice", "remove one")
        else:
            names[found["synset"]] = (found["words"] or "").strip()
    mistakes.stop()
    if not names:
        raise DataError(f"{path}: there are no synsets in it", "a line is `n01440764 tench, Tinca tinca`")
    if len(names) > 1 and all(re.match(r"[0-9]+\b", words) for words in names.values()):
        raise DataError(f"{path}: has ILSVRC2012_IDs, which are in another order than labels", _NO_IDS)
    classes = tuple(f"{synset} {text}".strip() for synset, text in names.items())
    return Synsets({synset: label for label, synset in enumerate(names)}, classes)


def classes_and_labels(place: str, found: list[str], synsets: str | None) -> tuple[tuple[str, ...], list[int]]:
    """(the classes, the label of each of the classes found): sorted, or as the synsets file has them."""
    if synsets is None:
        return tuple(found), list(range(len(found)))
    known = read_synsets(synsets)
    if strange := [name for name in found if name not in known.labels]:
        raise DataError(f"{place}: the class {strange[0]} is not in {synsets}", "is it the file of another set?")
    return known.classes, [known.labels[name] for name in found]


def read_truth(path: str, names: list[str], synsets: Synsets | None) -> tuple[list[int], tuple[str, ...]]:
    """The label of each of the images, and the classes. `names` are sorted file names.

    RecipeError with the lines that can't be read, DataError if some image has no label or the file is of another set.
    """
    words, values = _read_lines(path)
    if synsets is None and values and _SYNSET.fullmatch(values[0]):
        order = sorted(set(values))
        synsets = Synsets({synset: label for label, synset in enumerate(order)}, tuple(order))
    labels = _labels(path, values, synsets, named=bool(words))
    classes = synsets.classes if synsets else ()
    if not words:
        if len(labels) != len(names):
            raise DataError(
                f"{path}: {len(labels)} lines for {len(names)} images",
                "is it the ground truth of another set, or are there images missing?",
            )
        return labels, classes
    by_name = dict(zip(words, labels, strict=True))
    missing = [name for name in names if _stem(name) not in by_name]
    if missing:
        raise DataError(
            f"{path}: no label for {missing[0]} and {len(missing) - 1} other images", "is it of another set?"
        )
    return [by_name[_stem(name)] for name in names], classes


def _stem(name: str) -> str:
    """Without folders and suffix: Kaggle's file leaves the suffix out."""
    return PurePosixPath(name).name.partition(".")[0]


def _read_lines(path: str) -> tuple[list[str], list[str]]:
    """(file names without suffix, or nothing; synsets or numbers), one per line, all of one form."""
    mistakes = Mistakes(path)
    names: list[str] = []
    values: list[str] = []
    seen: set[str] = set()
    kaggle = False
    for number, line in lines(read_text(path)):
        if number == 1 and line == "ImageId,PredictionString":  # then `name,synset x y x y synset ...`
            kaggle = True
            continue
        parts = line.replace(",", " ").split()[:2] if kaggle else line.rsplit(None, 1)
        value = parts[-1]
        form = bool(_SYNSET.fullmatch(value)), len(parts) > 1
        if not form[0] and not _NUMBER.fullmatch(value):
            message = "neither a synset nor a label"
        elif values and form != (bool(_SYNSET.fullmatch(values[0])), bool(names)):
            message = "another form than the lines above"
        elif form[1] and _stem(parts[0]) in seen:
            message = "this image stands here twice"
        else:
            values.append(value)
            if form[1]:
                names.append(_stem(parts[0]))
                seen.add(names[-1])
            continue
        hint = "a line is `name synset`, `name label`, `synset` or `label`"
        mistakes.add(number, line, line.rfind(value), message, hint)
    mistakes.stop()
    if not values:
        raise DataError(f"{path}: there is nothing in it", "a line is `name synset`, `name label`, `synset` or `label`")
    return names, values


def _labels(path: str, values: list[str], synsets: Synsets | None, named: bool) -> list[int]:
    if _SYNSET.fullmatch(values[0]):
        assert synsets is not None
        if unknown := next((v for v in values if v not in synsets.labels), ""):
            raise DataError(f"{path}: {unknown} is not among the synsets", "is it of another set?")
        return [synsets.labels[value] for value in values]
    numbers = [int(value) for value in values]
    if not named and min(numbers) > 0:
        # Taken as labels, the devkit's IDs would train without complaint, and be wrong for nearly every image.
        raise DataError(
            f"{path}: these numbers count from 1, as the devkit's ILSVRC2012_IDs do, and are not labels", _NO_IDS
        )
    most = len(synsets.classes) - 1 if synsets else LARGEST_LABEL
    if max(numbers) > most:
        raise DataError(f"{path}: there is a label {max(numbers)}; they go to {most}", "labels count from 0")
    return numbers
