"""Imports go downward only, by the table below; torch stays above the floors that a login node uses."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "stagerun"

# A package imports from lower floors only. `errors` is below the other values, since spans and problems are part of them,
# `text` too, since a manifest and a plan print sizes alike. `spec` stands above `schedule`, so that a new learning-rate
# policy is one class and one row there, and `check` knows its fields from it.
FLOORS = [
    {"errors", "manual", "nodelist", "text", "units", "knobs", "proto", "signals"},
    {"system"},
    {"world", "events", "pulse", "topology", "spans", "recipe", "snapshots", "lmdb_file"},
    {"schedule", "order", "pace", "logged", "binding"},
    {"spec"},
    {"plan", "store", "data", "caffe_import"},
    {
        "models",
        "comm",
        "preflight",
        "drawing",
    },  # preflight has no torch: what starts workers compares facts before it needs it
    {"engine"},
    {"report", "launch"},
    {"watch"},  # it leaves its reports in the launcher's folder
    {"train"},  # the only one that imports plan, store, data and engine
    {"tools"},  # beside the run: only the commands import these
    {"cli"},
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
TORCH = {"models", "comm", "engine", "train"}
# Functions that start workers may import it: by then they are wanted.
TORCH_INSIDE_FUNCTIONS = {"launch", "cli"}
NOT_FROM_ENGINE = {"plan", "store", "data", "report", "cli", "launch", "train", "spec"}


def files() -> Iterator[tuple[str, Path]]:
    """(part of the house, file) for all but the package itself and generated code."""
    for path in sorted(ROOT.rglob("*.py")):
        part = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if not path.name.endswith("_pb2.py") and part not in ("__init__", "__main__"):
            yield part, path


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(dotted module, whether inside a function, line) of every import of a file. What is only for types doesn't count."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool, int]]:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            base = node.module or ""
            # `from stagerun import order` imports stagerun.order
            yield from ((f"{base}.{a.name}" if base == "stagerun" else base, inside, node.lineno) for a in node.names)
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, within)

    yield from walk(ast.parse(path.read_text()), False)


CASES = [pytest.param(part, path, id=str(path.relative_to(ROOT))) for part, path in files()]


def test_every_part_has_a_floor() -> None:
    assert {part for part, _ in files()} == set(FLOOR)


@pytest.mark.parametrize("part, path", CASES)
def test_imports_go_downward(part: str, path: Path) -> None:
    for module, _, line in imports(path):
        words = module.split(".")
        other = words[1] if words[0] == "stagerun" and len(words) > 1 else part
        if other in FLOOR and other != part:
            assert FLOOR[other] < FLOOR[part], f"{path}:{line}: {part} imports {other}, which is not below it"
            assert (part, other) not in {("engine", name) for name in NOT_FROM_ENGINE}, f"{path}:{line}"


@pytest.mark.parametrize("part, path", CASES)
def test_torch_stays_upstairs(part: str, path: Path) -> None:
    for module, inside, line in imports(path):
        if module.split(".")[0] in ("torch", "torchvision") and part not in TORCH:
            assert inside and part in TORCH_INSIDE_FUNCTIONS, f"{path}:{line}: {part} imports {module}"
