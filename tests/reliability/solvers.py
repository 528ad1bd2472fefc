"""Each trial puts 200 folders of mutated solver files through check, plan, lint, fmt and an editor: every one must give a
schedule, or mistakes of which each stands at a line and column of a file. Anything else is a failure: a traceback, a mistake without its
place, more than 2 GB of memory or 20 s for a folder.

The folders of solvers/ and tests/golden/spec are mutated. What loads is planned, rendered as text, JSON and CSV, and linted. A file that can be read is formatted: formatted again it stays as it is. The folder then has
the same canonical form, or, where all of its files can be read, the same mistakes. An editor that holds the files gets the mistakes and findings of `check`.
"""

import itertools
import json
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from facade import (
    SCHEDULE,
    SOLVER,
    Inventory,
    Problems,
    RecipeError,
    formatted,
    lint,
    render_json,
    render_text,
    stagerun_pb2,
)
from google.protobuf.descriptor import FieldDescriptor
from reliability import fuzz
from reliability.trial import Trial

from stagerun.base.errors import Problem
from stagerun.language import canonical, load
from stagerun.language.parse import parse
from stagerun.language.ranges import CHOICES
from stagerun.language.tree import is_message
from stagerun.plan import make_plan
from stagerun.plan.render import csv_rows
from stagerun.schedule import make_knobs
from stagerun.schedule.image_size import crop_size
from stagerun.tools.language_server import hover_text, look, proposals, range_of, target_at

ROOT = Path(__file__).parents[2]
GOOD = 'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_epoch: 2.5\n'
Texts = dict[str, bytes]  # name of a file -> its bytes


Whole = tuple[tuple[Texts, ...], tuple[Texts, ...]]


def folders(place: Path) -> Iterator[Texts]:
    for path in sorted(place.iterdir()):
        texts = {p.name: p.read_bytes() for p in sorted(path.glob("*.prototxt"))}
        if path.suffix == ".prototxt":
            texts = {"schedule.prototxt": path.read_bytes()} | {f"{stage}.prototxt": GOOD.encode() for stage in "ab"}
        if "schedule.prototxt" in texts:
            yield texts


# ---- mutations

NUMBER = re.compile(r"(?<![\w.\"#])[+-]?[0-9][0-9.]*(?:e[+-]?[0-9]+)?(?![\w\"])")
EXTREMES = (
    "0 -0 1 -1 2 7 0.5 1.5 1e-3 1e-300 5e-324 1e300 1.7976931348623157e308 1e999 nan inf -inf 65535 65536 2147483648 9223372036854775807 "
    "9223372036854775808 -9223372036854775808 0x7f 017 1e18 4503599627370497 0.1f 1000000007"
).split()
LETTERS = (
    "é", "\N{BYTE ORDER MARK}", "\u2028", "\u0130", "字", "\U0001f600", "\x00", "\x1b[31m", "\t", "\r", "\x0b", "#", '"', "\\",
    "'", "@", "\u202e",
)  # fmt: skip


def softly(rng: random.Random, text: str) -> str:
    """What often leaves a schedule: a number that is a little other, of another size, another's or an extreme one; or a field of the
    file's message, behind some line, with a value that may suit it."""
    numbers = list(NUMBER.finditer(text))
    if not numbers or rng.random() < 0.4:
        message = stagerun_pb2.Schedule if "model {" in text else stagerun_pb2.Solver
        lines = text.split("\n")
        lines.insert(rng.randrange(len(lines) + 1), field_text(rng, rng.choice(message.DESCRIPTOR.fields)))
        return "\n".join(lines)
    one = rng.choice(numbers)
    number = rng.choice([*EXTREMES, *(other.group() for other in numbers)])
    with suppress(ValueError, OverflowError):  # `1.0f`, or infinite
        near = float(one.group()) * rng.choice((0.1, 0.5, 0.9, 1.1, 2, 3, 10, 1000, -1))
        number = rng.choice((number, str(round(near)) if one.group().isdigit() else repr(near)))
    return text[: one.start()] + number + text[one.end() :]


def roughly(rng: random.Random, text: str, other: str) -> str:
    """Lines, words or characters that are lost, doubled, exchanged, another file's, or letters of other scripts; or a bit is flipped."""
    if rng.random() < 0.2:
        data = bytearray(text.encode(errors="surrogateescape"))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return data.decode(errors="surrogateescape")
    how = rng.choice((r"(\n)", r"(\s+)", "()"))
    parts, others = re.split(how, text), re.split(how, other)
    at, to, of = rng.randrange(len(parts)), rng.randrange(len(parts)), rng.randrange(len(others))
    put, end = rng.choice(  # what comes in the place of which parts
        (
            ([], at + rng.randint(1, 3)),
            ([], len(parts)),
            (parts[at : to + 1], at),
            ([parts[to], *parts[at + 1 : to], parts[at]], to + 1),
            (others[of : of + rng.randint(1, 9)], at),
            ([rng.choice(LETTERS)], at),
        )
    )
    return "".join(parts[:at] + put + parts[max(end, at) :])


def field_text(rng: random.Random, field: FieldDescriptor, depth: int = 0) -> str:
    if is_message(field):
        inner = rng.sample(list(field.message_type.fields), min(len(field.message_type.fields), rng.randint(0, 4)))
        return f"{field.name} {{ {' '.join(field_text(rng, f, depth + 1) for f in inner if depth < 3)} }}"
    values = [value_text(rng, field) for _ in range(rng.randint(1, 3) if field.is_repeated else 1)]
    return " ".join(f"{field.name}: {value}" for value in values)


def value_text(rng: random.Random, field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        return rng.choice([v.name for v in field.enum_type.values])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.choice(("true", "false"))
    if field.type == FieldDescriptor.TYPE_STRING:
        words = (*CHOICES.get(f"{field.containing_type.name}.{field.name}", ()), "a", "init", "main@3", "x/y", "")
        return json.dumps(rng.choice(words))
    number = rng.choice((rng.uniform(0, 1), rng.uniform(0, 100), rng.randint(0, 5), rng.randint(1, 5000), 0.5))
    if rng.random() < 0.1:
        return rng.choice(EXTREMES)
    return repr(number) if field.type == FieldDescriptor.TYPE_DOUBLE else str(int(number))


def folder_of(whole: Whole, seed: int, number: int) -> Texts:
    """Folder `number`: one to six mutations in the files of a folder, of solvers/ four times of five."""
    rng = random.Random(f"{seed} {number}")
    good, bad = whole
    texts, others = dict(rng.choice(good if rng.random() < 0.8 else bad)), rng.choice(good + bad)
    rough = rng.random() < 0.5
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        name = rng.choice(sorted(texts))
        other = others[rng.choice(sorted(others))].decode(errors="surrogateescape")
        text = texts[name].decode(errors="surrogateescape")
        if text:
            text = roughly(rng, text, other) if rough and rng.random() < 0.6 else softly(rng, text)
            texts[name] = text.encode(errors="surrogateescape")
    return texts


# ---- what must hold


def outcome(folder: Path, texts: Mapping[str, bytes]) -> str:
    """`schedule`; `parsed` with mistakes, though each of its files can be read; or `mistakes`. AssertionError where a mistake has no place; any other exception is a bug."""
    for path in folder.iterdir():
        path.unlink()
    write(folder, texts)
    styled = {name: again for name, data in texts.items() if (again := restyled(name, data)) is not None}
    try:
        schedule = load(folder)
    except RecipeError as error:
        assert error.problems, "an error without a mistake"
        for problem in error.problems:
            check_place(problem, folder)
        error.render()
        check_editor(folder, texts, error.problems)
        if len(styled) < len(texts):
            return "mistakes"
        write(folder, styled)
        try:
            load(folder)
        except RecipeError as again:
            assert said(again) == said(error), f"formatted, it has other mistakes: {said(again) ^ said(error)}"
            return "parsed"
        raise AssertionError("formatted, it has no mistakes") from None
    write(folder, styled)
    assert canonical(load(folder)) == canonical(schedule), "formatted, it is another schedule"
    write(folder, texts)
    plan = make_plan(schedule, Inventory())
    render_text(plan)
    json.loads(render_json(plan))
    list(itertools.islice(csv_rows(plan), 20))
    for stage in schedule.stages:
        knobs, last = make_knobs(stage.solver), stage.solver.max_iter - 1
        for iter in {0, last // 2, last}:
            knobs(iter)
            crop_size(stage.solver, iter)
    findings = lint(schedule)
    for finding in findings:
        check_place(finding, folder)
        finding.render()
    check_editor(folder, texts, findings)
    return "schedule"


def write(folder: Path, texts: Mapping[str, bytes]) -> None:
    for name, data in texts.items():
        (folder / name).write_bytes(data)


def said(error: RecipeError) -> set[str]:
    """Its mistakes without their places, and without the lines that messages name: formatting moves them."""
    return {re.sub(r"(?<=[: ])\d+(?=:\d)|(?<=line )\d+", "N", problem.message) for problem in error.problems}


def check_editor(folder: Path, texts: Mapping[str, bytes], found: Sequence[Problem]) -> None:
    """An editor has the files in its memory, none of them on disk. What it can't hold, because it isn't UTF-8, is left out."""
    try:
        typed = {str(folder / name): data.decode() for name, data in texts.items()}
    except UnicodeDecodeError:
        return
    for name in texts:
        (folder / name).unlink()
    looked = look(str(folder), typed)
    assert looked.problems == tuple(found), "an editor gets something else than `check` says"
    for problem in found:
        span, place = problem.span, range_of(problem.span)
        assert (place.start.line, place.start.character) == (span.line - 1, span.column - 1), (
            f"{span}: shown at another place"
        )
    for path, one in typed.items():
        lines = one.split("\n")
        line = len(lines) * 2 // 3
        place = target_at(one, looked.kinds[path], line, len(lines[line])) if path in looked.kinds else None
        if place is not None:
            hover_text(looked, path, place)
            list(proposals(looked, one, place))


def restyled(name: str, data: bytes) -> bytes | None:
    """The file as `stagerun fmt` writes it; None if it has mistakes."""
    found = Problems()
    parse(name, data, SCHEDULE if name == "schedule.prototxt" else SOLVER, found)
    if found:
        return None
    once = formatted(data.decode())
    assert formatted(once) == once, "formatted twice, it is another text"
    return once.encode()


def check_place(problem: Problem, folder: Path) -> None:
    path, line, column = problem.span.path, problem.span.line, problem.span.column
    assert Path(path).parent == folder and Path(path).exists(), f"{problem.span}: no such file: {problem.message}"
    lines = Path(path).read_bytes().decode(errors="replace").removeprefix("\N{BYTE ORDER MARK}").split("\n")
    assert 1 <= line <= len(lines), f"{problem.span}: the file has {len(lines)} lines: {problem.message}"
    width = len(lines[line - 1])
    assert 1 <= column <= width + 1, f"{problem.span}: the line has {width} characters: {problem.message}"
    assert problem.span.width >= 1 and problem.message, f"{problem.span}: {problem.message}"


def child(seed: int) -> None:
    # Those of tests/golden/spec have something wrong already.
    whole = tuple(folders(ROOT / "solvers")), tuple(folders(ROOT / "tests" / "golden" / "spec"))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-solvers-") as name:
        for number in fuzz.numbers():
            counts[outcome(Path(name), folder_of(whole, seed, number))] += 1
    fuzz.tell(counts)


def tried(seed: int, folders: int = 200) -> Trial:
    counts, failures = fuzz.tried("reliability.solvers", seed, folders)
    mistakes = counts["parsed"] + counts["mistakes"]
    words = {"schedules": counts["schedule"], "with mistakes": mistakes, "failures": len(failures)}
    return Trial(folders, words, wrong="; ".join(failures))


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    while True:
        yield tried(rng.randrange(2**32))


if __name__ == "__main__":
    child(int(sys.argv[1]))
