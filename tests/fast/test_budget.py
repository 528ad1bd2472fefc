"""The size of the house, which only falls: a commit may lower a number here; to raise one, its body says what was taken away for it.

And that tests look from outside: through commands, the library and the names in `facade`. What looks deeper forbids a rewrite.
"""

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import facade
import pytest
from click import Option
from facade import stagerun_pb2

from stagerun.base.proto import comments
from stagerun.cli import COMMANDS, GROUPS
from stagerun.language import tree
from stagerun.language.layers import is_twin

ROOT = Path(__file__).parents[2]

LINES = {"package": 56_267, "tests": 40_450}
CASES = 9_981  # lines in tests/cases
TOKENS = 427_131
FILES = 281
SCRIPTS = 14
COMMANDS_AND_SUBCOMMANDS = 21, 6
OPTIONS_OF_RUN = 20
FIELDS = 210
FACADE = 211  # names
LOOKING_DEEPER = 47  # test files that import from below stagerun.FOLDER, and not through the facade
PATCHES = 22  # monkeypatch.setattr
PRIVATE = set[str]()  # names of the package that tests use

# No comments, docstrings or layout: what a reader has to understand.
_LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}


def sources(folder: str) -> list[str]:
    """Texts of the Python files in a folder, without generated code."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [path.read_text() for path in paths if not path.name.endswith("_pb2.py")]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def tokens(text: str) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(parsed(text)) if isinstance(node, documented) and ast.get_docstring(node)]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}
    found = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type not in _LAYOUT and token.start not in docstrings for token in found)


@pytest.mark.parametrize(("name", "folder"), [("package", "stagerun"), ("tests", "tests")])
def test_lines(name, folder):
    assert sum(text.count("\n") for text in sources(folder)) <= LINES[name]


def test_lines_of_cases():
    texts = [path.read_text() for path in (ROOT / "tests/cases").rglob("*") if path.is_file()]
    assert sum(text.count("\n") for text in texts) <= CASES


def test_tokens_and_files_of_the_package():
    texts = sources("stagerun")
    assert len(texts) <= FILES
    assert sum(map(tokens, texts)) <= TOKENS


def test_scripts():
    assert sum(path.is_file() for path in (ROOT / "scripts").iterdir()) <= SCRIPTS


def test_commands_and_options():
    from stagerun.train.command import run

    counted = len(COMMANDS), sum(len(rows) for _, rows in GROUPS.values())
    assert all(number <= most for number, most in zip(counted, COMMANDS_AND_SUBCOMMANDS, strict=True)), counted
    assert len([one for one in run.params if isinstance(one, Option) and not one.hidden]) <= OPTIONS_OF_RUN


def test_fields_of_the_language_have_comments():
    messages = stagerun_pb2.DESCRIPTOR.message_types_by_name.values()
    # A duration and its twin in epochs are declared once.
    count = Counter(kind.name for kind in messages for field in tree.fields(kind) if not is_twin(field))
    assert sum(count.values()) <= FIELDS, count
    assert {f"{kind.name}.{field.name}" for kind in messages for field in tree.fields(kind)} <= comments().keys()


def test_tests_look_from_outside():
    assert len(facade.NAMES) <= FACADE
    texts = {path: path.read_text() for path in (ROOT / "tests").rglob("*.py") if path.name != "facade.py"}
    deeper = sorted(str(path.relative_to(ROOT)) for path, text in texts.items() if looks_deeper(parsed(text)))
    assert len(deeper) <= LOOKING_DEEPER, deeper
    assert sum(text.count("monkeypatch" + ".setattr(") for text in texts.values()) <= PATCHES
    ours, theirs = [list(map(parsed, each)) for each in (sources("stagerun"), texts.values())]
    assert used(theirs) & named(ours) - named(theirs) <= PRIVATE


def named(trees: list[ast.Module]) -> set[str]:
    """Private names of functions, classes, variables and attributes that are made there."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    found |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in found if name.startswith("_") and not name.endswith("_")}


def used(trees: list[ast.Module]) -> set[str]:
    """What is taken from a module or of an object."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return found | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def looks_deeper(tree: ast.AST) -> bool:
    """Whether something is imported from below stagerun.FOLDER."""
    modules = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            folder = ROOT / node.module.replace(".", "/")
            modules += [
                f"{node.module}.{a.name}" if (folder / f"{a.name}.py").exists() else node.module for a in node.names
            ]
    return any(module.startswith("stagerun.") and module.count(".") > 1 for module in modules)
