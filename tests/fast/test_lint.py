"""What `check` finds, what it passes over, and how a comment silences it: golden/lint/RULE.txt, a rule each.

A case there is what it changes of three files, in which nothing is to be found, and what is then found. `-- a:2 TEXT` replaces a line, or
adds one; `-- set ...` is a `--set`; of a rule that never fails, `-- trunk TEXT` is the solver of a stage, and only that rule is shown.
`scripts/golden` writes what is found anew. cases/check_findings: the command.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner
from facade import RULES, Level, Schedule, lint, problems

from stagerun import language
from stagerun.cli import main

SOLVERS = Path(__file__).parents[2] / "solvers"
GOLDEN = Path(__file__).parents[1] / "golden" / "lint"
CASES = sorted(path.stem for path in GOLDEN.iterdir())

# 10 iterations are an epoch; nothing to find.
SCHEDULE = """# head
model { name: "resnet18" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "val" images: 200 } }
solver {
  batch_size: 100 device_batch_size: 10 momentum: 0.9 weight_decay: 1e-4 snapshot: 10
  transform_param { crop_size: 24 mean_value: 104 scale: 0.01 }
}
stage { name: "a" }
stage { name: "b" }
"""
A = 'base_lr: 0.1\nlr_policy: "poly_cyc"\npower: 1\nmax_iter: 100\nlr_iter: 200\n'  # 0.1 -> 0.05
B = 'base_lr: 0.05\nlr_policy: "poly"\npower: 2\nmax_iter: 50\n'
TRUNK = """model { name: "resnet_small" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "val" images: 200 } }
solver { batch_size: 100 device_batch_size: 50 snapshot: 5 base_lr: 0.1 lr_policy: "fixed" max_iter: 20 transform_param { crop_size: 28 mean_value: 104 scale: 0.01 } }
stage { name: "trunk" solver_param { HERE } }
"""


def read(schedule: str = SCHEDULE, a: str = A, b: str = B, changes: Sequence[str] = ()) -> Schedule:
    return language.read({"schedule.prototxt": schedule, "a.prototxt": a, "b.prototxt": b}, "/runs/small", changes)


def found(**texts: object) -> list[str]:
    """`id path:line:column` of each warning."""
    return [f"{f.id} {f.span}" for f in lint(read(**texts)) if RULES[f.id].level is Level.WARNING]  # type: ignore[arg-type]


def cases(id: str) -> list[tuple[str, str]]:
    """What each case changes, and what is found."""
    return re.findall(r"((?:^-- .*\n)+)((?:^(?!-- ).*\n)+)", (GOLDEN / f"{id}.txt").read_text(), re.MULTILINE)


def changed(edits: str) -> dict[str, str]:
    lines = {name: text.splitlines() for name, text in (("schedule", SCHEDULE), ("a", A), ("b", B))}
    for name, line, text in re.findall(r"^-- (\w+):(\d+) ?(.*)$", edits, re.MULTILINE):
        lines[name][int(line) - 1 : int(line)] = [text]
    return {name: "\n".join(text) for name, text in lines.items()}


def said(id: str, edits: str) -> str:
    if edits.startswith("-- trunk "):
        schedule = read(TRUNK.replace("HERE", edits[len("-- trunk ") :].strip()))
        shown = [p.render() for p in problems(schedule, lint(schedule)) if f" [{id}]" in p.message + p.render()]
    else:
        schedule = read(**changed(edits), changes=re.findall(r"^-- set (.*)$", edits, re.MULTILINE))
        shown = [p.render() for p in problems(schedule, lint(schedule)) if p.level is Level.WARNING]
    return "\n".join(shown or ["nothing"]) + "\n\n"


def played(id: str) -> str:
    return "".join(edits + said(id, edits) for edits, _ in cases(id))


@pytest.mark.parametrize("id", CASES)
def test_what_is_found(id: str) -> None:
    assert played(id) == (GOLDEN / f"{id}.txt").read_text(), "run scripts/golden and read the difference"


def test_every_rule_has_its_cases_and_nothing_is_found_where_nothing_is() -> None:
    assert set(CASES) == set(RULES) - {"lint-comment", "far-mean"}
    assert all(any(f"[{id}]" in text for _, text in cases(id)) for id in CASES)
    assert found() == []


def test_images_that_are_here_are_looked_at(tmp_path: Path) -> None:
    """A mean, and sizes of which only some fit; a comment is no finding where they aren't here."""
    white, small = tmp_path / "white", tmp_path / "small"
    for folder, level, side in ((white, 240, 64), (small, 100, 27)):
        (folder / "images" / "a").mkdir(parents=True)
        picture = np.random.default_rng(1).integers(level - 9, level + 9, (side, side, 3), np.uint8)
        cv2.imwrite(str(folder / "images" / "a" / "1.png"), picture)
        done = CliRunner().invoke(main, ["data", "import", str(folder / "images"), str(folder / "lmdb")])
        assert done.exit_code == 0, done.output
    more = 'transform_param { random_resized_crop_param {} crop_size: 24 mean_value: 104 scale: 0.01 } clear: "transform_param"'
    resized = {"b": B + more}
    for train, val, expected in (
        (white, white, ["far-mean schedule.prototxt:6:47", "far-mean b.prototxt:5:74", "other-sizes b.prototxt:5:59"]),
        (small, small, []),
        (small, white, ["other-sizes b.prototxt:5:59"]),
    ):
        schedule = SCHEDULE.replace('"train"', f'"{train}/lmdb"').replace('"val"', f'"{val}/lmdb"')
        assert sorted(found(schedule=schedule, **resized)) == sorted(expected)
    silenced = {
        "schedule": "# lint: ignore far-mean, other-sizes\n" + SCHEDULE,
        "b": "# lint: ignore other-sizes\n" + B,
    }
    assert found(**silenced) == []


@pytest.mark.parametrize("id", [id for id in CASES if RULES[id].level is Level.WARNING])
@pytest.mark.parametrize("where", ["head", "line", "above", "above, among others"])
def test_a_comment_silences_it(id: str, where: str) -> None:
    edits, expected = cases(id)[0]
    name, number = re.match(r"(\w+)\.prototxt:(\d+):", expected).groups()
    texts, line = changed(edits), int(number) - 1
    lines, comment = texts[name].splitlines(), f"# lint: ignore {id}: as published"
    if where == "head":
        lines = [comment, *lines]
    elif where == "line":
        lines[line] += "  " + comment
    else:
        more = ["  # lint: ignore " + id, "  # why"] if "others" in where else [comment]
        lines = ['clear: "display"' if name != "schedule" else "seed: 2", *lines[:line], *more, *lines[line:]]
        texts["schedule"] = texts["schedule"].replace("snapshot: 10", "snapshot: 10 display: 5")
        if name == "schedule":
            lines = [text.replace("snapshot: 10", "snapshot: 10 display: 5") for text in lines]
    assert found(**(texts | {name: "\n".join(lines)})) == []


TWICE = {"a": A + "warmup_iter: 10 warmup_start_lr: 0.2", "b": B + "snapshot: 51"}


START = "warmup-start a.prototxt:7:34"


@pytest.mark.parametrize(
    "comment, expected",
    [
        ("# lint: ignore warmup-start", []),
        ("#lint:ignore warmup-start", []),
        ("# lint: ignore unsaved-work", ["lint-comment a.prototxt:1:16", START]),  # it is in another file
        ("# lint: ignore warmup-start, lr-jump", ["lint-comment a.prototxt:1:30"]),
        ("# lint: ignore warmup-strat", ["lint-comment a.prototxt:1:16", START]),
        ("# lint: ignore", ["lint-comment a.prototxt:1:1", START]),
        ("## Lint: as usual", [START]),
        ("# lint: off", ["lint-comment a.prototxt:1:1", START]),
        ("# lint: ignore lint-comment", ["lint-comment a.prototxt:1:16", START]),
    ],
)
def test_comments_that_do_too_little(comment: str, expected: list[str]) -> None:
    rest = found(a=f"{comment}\n{TWICE['a']}", b=TWICE["b"])
    assert rest == [*expected, "unsaved-work b.prototxt:5:11"]


def test_a_comment_below_silences_nothing() -> None:
    assert found(a=TWICE["a"] + "\n# lint: ignore warmup-start") == [
        "warmup-start a.prototxt:6:34",
        "lint-comment a.prototxt:7:16",
    ]


def test_a_hash_in_a_string_is_no_comment() -> None:
    text = SCHEDULE.replace('"train"', '"# lint: ignore no-test"').replace('val { source: "val" images: 200 } }', "}")
    assert found(schedule=text) == ["no-test schedule.prototxt:3:24"]
    assert found(schedule=text.replace("1000 } }", "1000 } }# lint: ignore no-test")) == []


def test_every_rule_is_explained() -> None:
    told = CliRunner().invoke(main, ["help", "lint"])
    assert told.exit_code == 0 and all(id in told.output for id in RULES)


@pytest.mark.parametrize("folder", sorted(p.name for p in SOLVERS.iterdir() if (p / "schedule.prototxt").exists()))
def test_what_comes_with_stagerun_is_clean(folder: str) -> None:
    schedule = language.load(SOLVERS / folder)
    assert [p.render() for p in problems(schedule, lint(schedule)) if p.level is Level.WARNING] == []


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(played(case))
