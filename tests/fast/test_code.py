"""Python that a schedule names: the name, the files that it takes, what is wrong with them, and the import."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagerun.base.code import Code, Sources, WrongCode, code_of
from stagerun.base.errors import Problems, Span
from stagerun.language import code as language
from stagerun.language.code import MISSING, LocalFiles, Unreadable
from stagerun.system.code import called, function_of

PLACE = Span("dir/schedule.prototxt", 2, 14, 14)


def looked_at(files: dict[str, "str | bytes | Unreadable"], name: str) -> tuple[tuple[str, ...], list[str]]:
    """The files of a function, and the problems as printed."""
    problems = Problems()
    local = LocalFiles(lambda path: files.get(path, MISSING), "dir", problems)
    found = local.require(code_of(name), PLACE)
    return found, [p.render() for p in problems.all()]


@pytest.fixture
def fresh() -> Iterator[None]:
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders
    function_of(Code("", "os.path", "join"), Sources())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mynet.py", "names a file and no function"),
        ("mynet.py:", "`` can't be the name of a function"),
        ("mynet.py:build()", "`build()` can't be the name"),
        ("../mynet.py:build", "is not below the schedule's folder"),
        ("nets/../../mynet.py:build", "is not below the schedule's folder"),
        ("/tmp/mynet.py:build", "is not below the schedule's folder"),
        ("~/mynet.py:build", "is not below the schedule's folder"),
        ("./mynet.py:build", "begins with `./`"),
        ("my net.py:build", "can't be imported"),
        ("v1.0/mynet.py:build", "can't be imported"),
        ("a//mynet.py:build", "can't be imported"),
        ("pack age:build", "neither a Python file nor"),
        ("C:\\mynet.py:build", "can't be imported"),
    ],
)
def test_a_name_that_is_no_function_is_refused(text: str, message: str) -> None:
    with pytest.raises(WrongCode) as wrong:
        code_of(text)
    assert message in wrong.value.message
    assert wrong.value.hint


def test_the_files_of_a_function_are_all_that_it_imports_below_the_folder() -> None:
    files: dict[str, str | bytes | Unreadable] = {
        "nets/mynet.py": "import torch.nn\nfrom . import blocks\ndef build():\n    import layers.norm as n\n",
        "nets/__init__.py": "",
        "nets/blocks.py": "from ..outside import x\nfrom .deep.a import b\n",
        "nets/deep/a.py": "from nets import mynet\n",
        "layers/norm.py": "if 1:\n    from helpers import *\n",
        "helpers.py": b"import helpers\n",
        "outside.py": "",
        "unused.py": "def (",
    }
    found, problems = looked_at(files, "nets/mynet.py:build")
    assert problems == []
    assert found == (
        "helpers.py", "layers/norm.py", "nets/__init__.py", "nets/blocks.py", "nets/deep/a.py", "nets/mynet.py", "outside.py",
    )  # fmt: skip


def test_an_edit_anywhere_in_the_files_changes_the_digest() -> None:
    files = [("a.py", "x = 1\n"), ("b.py", "")]
    same = language.digest(reversed(files))
    assert language.digest(files) == same
    for edited in (
        [("a.py", "x = 1  # one\n"), ("b.py", "")],
        [("a.py", "x = 1\n"), ("c.py", "")],
        [("a.py", "x = 1\nb.py")],
    ):
        assert language.digest(edited) != same


@pytest.mark.parametrize(
    ("files", "name", "expected"),
    [
        ({}, "mynet.py:build", ["dir/schedule.prototxt:2:14: dir/mynet.py: there is no such file\n  hint: it belongs beside schedule.prototxt"]),
        ({"mynet.py": Unreadable("this is not a regular file")}, "mynet.py:build", ["dir/schedule.prototxt:2:14: dir/mynet.py: this is not a regular file\n  hint: it belongs beside schedule.prototxt"]),
        ({"mynet.py": "def built(): ...\n"}, "mynet.py:build", ["dir/schedule.prototxt:2:14: dir/mynet.py has no function `build`\n  hint: did you mean `built`?"]),
        (
            {"mynet.py": "import blocks\ndef build(): ...\n", "blocks.py": "class A:\n    def f(self)\n        pass\n"},
            "mynet.py:build",
            ["dir/blocks.py:2:16: this is not Python: expected ':'\n      def f(self)\n                 ^"],
        ),
        ({"mynet.py": b"# caf\xe9\ndef build(): ...\n"}, "mynet.py:build", ["dir/mynet.py:1:1: the line is not UTF-8\n  hint: save the file as UTF-8"]),
        (
            {"mynet.py": "import random\ndef build(): ...\n", "random.py": ""},
            "mynet.py:build",
            ["dir/mynet.py:1:1: `random` is Python's or torch's own, and there is a file of that name\n  import random\n  ^^^^^^^^^^^^^\n  hint: rename dir/random.py"],
        ),
        ({"torch.py": "def build(): ..."}, "torch.py:build", ["dir/schedule.prototxt:2:14: `torch.py` has the name of Python's or torch's own `torch`\n  hint: rename it"]),
    ],
)  # fmt: skip
def test_a_mistake_in_python_has_its_place(
    files: dict[str, str | bytes | Unreadable], name: str, expected: list[str]
) -> None:
    assert looked_at(files, name)[1] == expected


@pytest.mark.parametrize(
    "text",
    ["class build: ...", "build = print", "from os.path import join as build", "from x import *", "try:\n    import build\nexcept ImportError:\n    build = None", "if 1:\n    def build(): ..."],
)  # fmt: skip
def test_a_function_may_be_defined_in_any_way(text: str) -> None:
    assert looked_at({"mynet.py": text}, "mynet.py:build") == (("mynet.py",), [])


def test_a_package_has_its_version_without_an_import() -> None:
    assert language.version("PIL") == language.metadata.version("pillow")
    assert language.version("click") == language.metadata.version("click")
    assert language.version("json") == "unknown"
    assert language.version("no_such_package") == language.ABSENT


def test_what_runs_is_the_text_that_was_checked(fresh: None, tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text("width = 2\n")
    mynet = "from blocks import width\nfrom pathlib import Path\nhere = Path(__file__)\ndef build(more=0):\n    import blocks\n    return width + more, here\n"
    for width in (3, 4):  # the second as after an edit
        sources = Sources(str(tmp_path), (("blocks.py", f"width = {width}\n"), ("nets/mynet.py", mynet)))
        code = code_of("nets/mynet.py:build")
        assert called(code, sources, function_of(code, sources), more=1) == (width + 1, tmp_path / "nets" / "mynet.py")
    assert list(tmp_path.rglob("*.pyc")) == []


def test_a_file_that_is_named_like_a_package_is_pointed_at(fresh: None) -> None:
    # A run of that file in this process makes it no package.
    function_of(code_of("ournet.py:build"), Sources("dir", (("ournet.py", "def build(): pass"),)))
    _, problems = looked_at({"ournet.py": "def build(): pass"}, "ournet:build")
    assert len(problems) == 1 and 'write `"ournet.py:build"`' in problems[0], (
        sys.meta_path,
        sys.path,
        sys.modules["ournet"],
    )
    assert looked_at({}, "ournet:build")[1] == []
