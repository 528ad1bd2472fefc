"""What `check` finds, what it passes over, and how a comment silences it: golden/lint/RULE.txt, a rule each.

A case there is what it changes of three files, in which nothing is to be found, and what is then found. `-- a:2 TEXT` replaces a line, or
adds one; `-- set ...` is a `--set`; of a rule that never fails, `-- trunk TEXT` is the solver of a stage, and only that rule is shown.
lint-comment has where comments are seen. `scripts/dev golden` writes what is found anew. cases/check_findings: the command.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import contract
import made_images
import pytest
from facade import RULES, Level, Schedule, lint

from stagerun import language

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
    return [f"{f.id} {f.span}" for f in lint(read(**texts)) if RULES[f.id].level is Level.WARNING]


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
        shown = [p.render() for p in lint(schedule) if f" [{id}]" in p.message + p.render()]
    else:
        schedule = read(**changed(edits), changes=re.findall(r"^-- set (.*)$", edits, re.MULTILINE))
        shown = [p.render() for p in lint(schedule) if p.level is Level.WARNING]
    return "\n".join(shown or ["nothing"]) + "\n\n"


def played(id: str) -> str:
    return "".join(edits + said(id, edits) for edits, _ in cases(id))


@pytest.mark.parametrize("id", CASES)
def test_what_is_found(id):
    assert played(id) == (GOLDEN / f"{id}.txt").read_text(), "run scripts/dev golden and read the difference"


def test_every_rule_has_its_cases_and_nothing_is_found_where_nothing_is():
    assert set(CASES) == set(RULES) - {"far-mean", "published-numbers", "same-images"}  # train/test_planted_mistakes
    assert all(any(f"[{id}]" in text for _, text in cases(id)) for id in CASES)
    assert found() == []


def test_sizes_of_images_that_are_here_are_looked_at(tmp_path):
    """Their means, too: train/test_planted_mistakes."""
    for name, side in (("large", 64), ("small", 27)):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a" / "1.png").write_bytes(made_images.png(1, side, side))
        assert contract.stagerun(["data", "import", name, f"{name}_lmdb"], tmp_path).exit_code == 0
    resized = 'transform_param { random_resized_crop_param {} crop_size: 24 mean_value: 104 scale: 0.01 } clear: "transform_param"'
    for train, val, seen in (("large", "large", True), ("small", "small", False), ("small", "large", True)):
        here = [f'"{tmp_path}/{name}_lmdb"' for name in (train, val)]
        schedule = SCHEDULE.replace('"train"', here[0]).replace('"val"', here[1])
        assert ("other-sizes b.prototxt:5:59" in found(schedule=schedule, b=B + resized)) is seen


@pytest.mark.parametrize("id", [id for id in CASES if RULES[id].level is Level.WARNING and id != "lint-comment"])
def test_a_comment_silences_it(id):
    edits, expected = cases(id)[0]
    name, number = re.match(r"(\w+)\.prototxt:(\d+):", expected).groups()
    lines = (texts := changed(edits))[name].splitlines()
    lines[int(number) - 1] += f"  # lint: ignore {id}: as published"
    assert found(**(texts | {name: "\n".join(lines)})) == []


def test_every_rule_is_explained(tmp_path):
    told = contract.stagerun(["help", "lint"], tmp_path)
    assert told.exit_code == 0 and all(id in told.output for id in RULES)


@pytest.mark.parametrize("folder", sorted(p.name for p in SOLVERS.iterdir() if (p / "schedule.prototxt").exists()))
def test_what_comes_with_stagerun_is_clean(folder):
    schedule = language.load(SOLVERS / folder)
    assert [p.render() for p in lint(schedule) if p.level is Level.WARNING] == []


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(played(case))
