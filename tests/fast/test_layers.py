"""The map of the house: the trunk never imports a tool, tools don't import each other in circles, and torch stays out of what a login node
uses."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2] / "stagerun"

# From values that know nothing to the run. A folder imports from those before it only. `schedule` comes before `language`: a new
# learning-rate policy is one class and one row there, and the language knows its fields from it.
TRUNK = (
    "base", "system", "schedule", "language", "command", "plan", "store", "data",
    "models", "comm", "engine", "launch", "logs", "train", "manual", "cli",
)  # fmt: skip
# Features that most runs don't use, each whole in one folder. A wing imports the trunk.
WINGS = {"caffe", "look", "wire"}
# The engine gets values and yields events: it knows no files, no plan and no snapshots.
NOT_FROM_ENGINE = {"language", "plan", "store", "data", "launch", "train"}

# Who may import torch: anywhere, or inside functions that start workers, which want it by then.
TORCH = {"models", "comm", "engine", "train", "wire", "caffe", "tools"}
TORCH_INSIDE_FUNCTIONS = {"launch"}
# What click loads for one line of help or a mistake in the arguments, and `run` for one in DIR; and everything outside TORCH besides.
COMMANDS = ("command", "first_look")
OF_CAFFE = "binary data_layers layers map_layers reading resolve schedule table tensors text importer.command"
LIGHT = {f"stagerun.wire.{name}" for name in ("values", "rules", "choices", "replay")}  # the language reads them
LIGHT |= {f"stagerun.caffe.{name}" for name in OF_CAFFE.split()}


class Import(NamedTuple):
    module: str  # dotted; of `from stagerun.base import order` stagerun.base.order
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
                part_of_it = not base or whole in files() or base in ("stagerun", "stagerun.tools")
                yield Import(whole if part_of_it else base, inside, place)
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, within)

    return tuple(walk(ast.parse(path.read_text()), False))


def folder(module: str) -> str:
    """`plan`, or `tools`; "" for the package itself, `__main__`, and what is not ours."""
    ours, *words = module.split(".")
    return words[0] if ours == "stagerun" and words and not words[0].startswith("__") else ""


def edges() -> Iterator[tuple[str, str, Import]]:
    """(folder, another folder, an import of it)."""
    for module, path in files().items():
        for one in imports(path):
            if (own := folder(module)) and (other := folder(one.module)) and other != own:
                yield own, other, one


@cache
def loaded_by(module: str) -> frozenset[str]:
    """The module itself, and what it and those import outside of functions."""
    loaded: set[str] = set()
    todo = [module]
    while todo:
        one = todo.pop()
        if one not in loaded:
            loaded.add(one)
            todo += [i.module for i in imports(files()[one]) if not i.inside] if one in files() else []
            todo += [one.rpartition(".")[0]] if "." in one else []
    return frozenset(loaded)


def test_every_folder_is_on_the_map_and_says_what_lives_there():
    assert {folder(module) for module in files()} - {""} == {*TRUNK, *WINGS, "tools"}
    packages = [m for m, path in files().items() if path.name == "__init__.py"]
    assert [m for m in packages if not ast.get_docstring(ast.parse(files()[m].read_text()))] == []


def test_the_trunk_imports_downward_and_never_a_tool():
    wrong = [
        f"{one.place}: {own} imports {other}"
        for own, other, one in edges()
        if own in TRUNK
        if other not in TRUNK
        or TRUNK.index(other) >= TRUNK.index(own)
        or (own == "engine" and other in NOT_FROM_ENGINE)
    ]
    assert wrong == []


def test_no_imports_go_in_circles_and_none_is_of_the_table_of_commands():
    left = {m: {i.module for i in imports(path) if not i.inside} & files().keys() - {m} for m, path in files().items()}
    # A package and its modules import each other: Python loads the package first.
    left = {m: {other for other in others if not m.startswith(f"{other}.")} for m, others in left.items()}
    while first := {module for module, others in left.items() if not others & left.keys()}:
        left = {module: others for module, others in left.items() if module not in first}
    assert left == {}
    # Commands are looked up by name in the table, so that none is loaded with another.
    assert [one.place for own, other, one in edges() if other == "cli"] == []


def test_a_login_node_needs_no_torch():
    torch = {"torch", "torchvision"}
    wrong = [
        f"{one.place}: {own} imports {one.module}"
        for module, path in files().items()
        for one in imports(path)
        if one.module.partition(".")[0] in torch and (own := folder(module)) not in TORCH
        if not (one.inside and own in TORCH_INSIDE_FUNCTIONS)
    ]
    assert wrong == []
    light = [m for m in files() if folder(m) not in TORCH or m in LIGHT or m.rpartition(".")[2] in COMMANDS]
    assert [m for m in light if loaded_by(m) & torch] == []
