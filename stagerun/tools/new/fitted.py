"""A schedule's files fitted to other images: their texts, edited in place, so that layout and comments stay. Pure."""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stagerun.base import recipe, units
from stagerun.base.errors import Problems
from stagerun.language import stages
from stagerun.language.layers import DURATIONS
from stagerun.language.lexer import Kind, tokens
from stagerun.language.parse import parse
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.tree import SCHEDULE, SOLVER, Block, Entry, quoted

# Not the updates that a rate is ahead by, however long the stage.
_EPOCHS = {iterations: epochs for iterations, epochs in DURATIONS if iterations != "policy_start_iter"}
_START = re.compile(r'"([\w-]+)@(\d+)"')
_LENGTH = re.compile(r"[:,;][^:,;]*\d[\d,.]* updates?\b.*")  # `: 7800 updates, 25 epochs`


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """`train` and `val` are paths with their number of records, `side` the shortest side of any image in pixels, `mean` and
    `deviation` those of B, G and R, or of grey."""

    train: tuple[str, int]
    val: tuple[str, int]
    classes: int
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


def fitted(
    texts: Mapping[str, str], schedule: recipe.Schedule, name: str, about: str, images: Images
) -> dict[str, str]:
    """The texts, by file, of the same stages under another name for other images; `schedule` is what `texts` say, `about` the new
    first paragraph. Lengths in iterations become epochs; of comments in lines that change, only lint's stay, and of each file's head
    its first paragraph, without numbers of updates.
    """
    texts = {file: text.removeprefix("\N{BYTE ORDER MARK}") for file, text in texts.items()}
    first = texts[SCHEDULE_FILE]
    for match in _START.finditer(first):
        moved = max(1, round(int(match[2]) * images.train[1] / schedule.data.train.images))
        for mark in "@_":  # `trunk@15000`, and the stage `cooldown_trunk_15000` that it makes
            first = first.replace(f"{match[1]}{mark}{match[2]}", f"{match[1]}{mark}{moved}")
    batches = {stage.group or stage.name: stage.solver.batch_size for stage in schedule.stages}

    def edited(source: str, root: Block, about: Sequence[str], batch: int) -> str:
        return _File(source, root, schedule, images, name, batches).text(about, batch)

    root = parse(SCHEDULE_FILE, first, SCHEDULE, Problems())
    result = {SCHEDULE_FILE: edited(first, root, [about], schedule.stages[0].solver.batch_size)}
    for node in stages.nodes(root, Problems()):
        if node.file is not None and node.file in texts and node.file not in result:
            source = texts[node.file]
            block = parse(node.file, source, SOLVER, Problems())
            result[node.file] = edited(source, block, description(source), batches[node.group or node.name])
    return result


def description(text: str) -> list[str]:
    """The sentences of the first paragraph of a file's head that hold for any images."""
    head = "\n".join(
        line[1:].strip() for line in text[: _head_end(text)].split("\n") if not line.startswith("# proto-")
    )
    paragraph = head.strip().partition("\n\n")[0].replace("\n", " ")
    sentences = (_LENGTH.sub("", s.rstrip(".")) for s in re.split(r"(?<=\.) ", paragraph))
    return [s + "." for s in sentences if s and "update " not in s and " updates" not in s]


def _head_end(text: str) -> int:
    match = re.match(r"(?:#.*\n)*", text)
    return match.end() if match else 0


class _File:
    """One file while it is edited: `edits` are (start, end, new text) of stretches of `source`. `batches`: of stages, by block."""

    def __init__(
        self, source: str, root: Block, schedule: recipe.Schedule, images: Images, name: str, batches: Mapping[str, int]
    ) -> None:
        self.source, self.root, self.schedule, self.images = source, root, schedule, images
        self.name, self.batches = name, batches
        self.tokens = tokens(source)
        starts = [0, *accumulate(len(line) + 1 for line in source.split("\n"))]
        self.ends = [starts[t.line - 1] + t.column - 1 + len(t.text) for t in self.tokens]
        self.place = {(t.line, t.column): i for i, t in enumerate(self.tokens)}
        self.edits: list[tuple[int, int, str]] = []

    def text(self, about: Sequence[str], batch: int) -> str:
        """The file after all edits. `batch`: images per update, where no block says another number."""
        self.visit(self.root, batch)
        lines = textwrap.wrap(" ".join(about), 118, break_on_hyphens=False)
        head = [
            "proto-file: protos/stagerun.proto",
            f"proto-message: {self.root.kind.name}",
            *[""] * bool(lines),
            *lines,
        ]
        text, at = "", _head_end(self.source)
        for start, end, new in sorted(self.edits):
            text += self.source[at:start] + new
            at = max(at, end)  # a comment inside of a list goes with the list
        text = re.sub(r"\n[ \t]+(?=\n)", "", text + self.source[at:])
        return "".join(f"# {line}".rstrip() + "\n" for line in head) + text

    def visit(self, block: Block, batch: int) -> None:
        if block.kind.name == "StageEntry":
            batch = self.batches[str(block.entries["name"].values[0].value)]
        elif "batch_size" in block.entries:
            batch = int(str(block.entries["batch_size"].values[0].value))
        for entry in block.entries.values():
            if new := list(self.changed(block, entry, batch)):
                self.replace(entry, new)
            branch = entry.field.name == "from" and "@" in str(entry.values[0].value)
            # Comments say where images come from, or how long something takes.
            if branch or entry.field.name in ("data", "snapshot_epoch"):
                self.without_comment(self.place[entry.name.line, entry.name.column])
            for inner in block.blocks(entry.field.name):
                self.visit(inner, batch)

    def changed(self, block: Block, entry: Entry, batch: int) -> Iterator[str]:
        """What is to stand in place of a field: a text for each time it is written, '' to take it out; nothing to leave it."""
        images, field = self.images, entry.field.name
        match block.kind.name, field:
            case "Schedule", "name":
                yield f"name: {quoted(self.name)}"
            case "Model", "num_classes":
                grey = len(images.mean) == 1 and "channels" not in block.entries
                yield f"num_classes: {images.classes}" + "  channels: 1" * grey
            case "Model", "channels":
                yield f"channels: {len(images.mean)}"
            case "Source", "source" | "images":
                data = self.root.block("data")
                path, number = images.train if data is not None and data.block("train") is block else images.val
                count = "" if "images" in block.entries else f" images: {number}"
                yield f"images: {number}" if field == "images" else f"source: {quoted(path)}{count}"
            case "TransformParameter", "crop_size" if "pad" in block.entries:  # the whole image, moved by the padding
                yield f"crop_size: {images.side}"
            case "TransformParameter", "mean_value" | "std_value" | "scale" if "mean_value" in block.entries:
                word, values = ("mean_value", images.mean) if field == "mean_value" else ("std_value", images.deviation)
                order = block.entries.get("channel_order")
                values = values[::-1] if order is not None and order.values[0].value == "RGB" else values
                text = ", ".join(f"{value:.4g}" for value in values)
                text = f"[{text}]" if len(values) > 1 else text
                yield "" if field == "scale" and "std_value" in block.entries else f"{word}: {text}"
                yield from [""] * (len(entry.values) - 1)
            case ("Solver", _) | ("Knot", "iter") if field in (*_EPOCHS, "iter"):
                for value in entry.values:
                    epochs = units.epochs(int(str(value.value)), self.schedule.data.train.images, batch)
                    yield f"{_EPOCHS.get(field, 'epoch')}: {epochs:.3g}"

    def replace(self, entry: Entry, new: Sequence[str]) -> None:
        """The new texts in the places of the field's values, of which a list in brackets is one; no comment stays behind."""
        places: dict[int, tuple[int, list[str]]] = {}
        for value, text in zip(entry.values, new, strict=True):
            last = first = self.place[value.span.line, value.span.column]
            while self.tokens[first].kind is not Kind.WORD:
                first -= 1
            while self.tokens[last + 1].text == "]" or self.tokens[last + 1].kind is Kind.STRING:
                last += 1
            texts = places[first][1] if first in places else []
            places[first] = last, [*texts, *[text] * bool(text)]
        for first, (last, texts) in places.items():
            start = self.ends[first] - len(self.tokens[first].text)
            self.edits.append((start, self.ends[last], "  ".join(texts)))
            self.without_comment(last)

    def without_comment(self, at: int) -> None:
        """Takes away the comment behind the line of a token, but for one that lint reads."""
        while self.tokens[at + 1].line == self.tokens[at].line and self.tokens[at + 1].kind is not Kind.END:
            at += 1
        end = self.ends[at] + len(self.source[self.ends[at] :].partition("\n")[0])
        if "lint:" not in self.source[self.ends[at] : end]:
            self.edits.append((self.ends[at], end, ""))
