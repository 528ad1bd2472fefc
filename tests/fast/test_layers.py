"""Imports go downward only, by the table below; torch stays above the floors that a login node uses."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


class Import(NamedTuple):
    module: str  # dotted; of `from stagerun import order` stagerun.order
    inside: bool  # a function
    place: str


@cache
def files() -> dict[str, Path]:
    """Path by dotted name, of all but generated code."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        words = path.relative_to(ROOT.parent).with_suffix("").parts
        if not path.name.endswith("_pb2.py"):
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """What is only for types doesn't count."""

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            place = f"{path.relative_to(ROOT.parent)}:{node.lineno}"
            base = ""
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{place}: a relative import"
                base = node.module
            for alias in node.names:
                whole = f"{base}.{alias.name}".removeprefix(".")
                yield Import(whole if not base or base == "stagerun" or whole in files() else base, inside, place)
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, within)

    return tuple(walk(ast.parse(path.read_text()), False))


def part(module: str) -> str:
    """The part of the house that a module belongs to; "" for the package itself, `__main__`, and what is not ours."""
    words = module.split(".")
    return words[1] if words[0] == "stagerun" and len(words) > 1 and words[1] not in ("__main__", "__version__") else ""


def closure(module: str) -> set[str]:
    """What is loaded with a module: itself, and what it and those import outside of functions."""
    loaded, todo = set(), [module]
    while todo:
        one = todo.pop()
        if one not in loaded:
            loaded.add(one)
            todo += [i.module for i in imports(files()[one]) if not i.inside] if one in files() else []
            todo += [one.rpartition(".")[0]] if "." in one else []
    return loaded


def test_imports_go_downward() -> None:
    assert {part(module) for module in files()} - {""} == set(FLOOR), "every part has a floor"
    wrong = [
        f"{one.place}: {own} imports {other}, which is not below it"
        for module, path in files().items()
        for one in imports(path)
        if (own := part(module)) and (other := part(one.module)) and other != own
        if FLOOR[other] >= FLOOR[own] or (own == "engine" and other in NOT_FROM_ENGINE)
    ]
    assert wrong == []


def test_torch_stays_upstairs() -> None:
    """The second half holds what a command loads before it is known which one it is, and what any part below does."""
    wrong = [
        f"{one.place}: {own} imports {one.module}"
        for module, path in files().items()
        for one in imports(path)
        if one.module.split(".")[0] in ("torch", "torchvision") and (own := part(module)) not in TORCH
        if not (one.inside and own in TORCH_INSIDE_FUNCTIONS)
    ]
    assert wrong == []
    assert [m for m in files() if part(m) not in TORCH and closure(m) & {"torch", "torchvision"}] == []


def test_the_language_needs_no_arrays() -> None:
    assert not {name.partition(".")[0] for name in closure("stagerun.spec")} & {"numpy", "lmdb", "cv2"}
