"""Python that a schedule names, as it runs: the text that was checked, and versions of packages."""

import importlib.metadata
import sys

import pytest

from stagerun.base import code
from stagerun.language import code as language
from stagerun.system import code as system


@pytest.fixture
def fresh():
    before, finders = set(sys.modules), list(sys.meta_path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.meta_path[:] = finders
    system.function_of(code.Code("", "os.path", "join"), code.Sources())


def test_a_package_has_its_version_without_an_import():
    assert language.version("PIL") == importlib.metadata.version("pillow")
    assert language.version("click") == importlib.metadata.version("click")
    assert language.version("json") == "unknown"
    assert language.version("no_such_package") == language.ABSENT


def test_what_runs_is_the_text_that_was_checked(fresh, tmp_path):
    (tmp_path / "blocks.py").write_text("width = 2\n")
    mynet = "from blocks import width\nfrom pathlib import Path\nhere = Path(__file__)\ndef build(more=0):\n    import blocks\n    return width + more, here\n"
    for width in (3, 4):  # the second as after an edit
        sources = code.Sources(str(tmp_path), (("blocks.py", f"width = {width}\n"), ("nets/mynet.py", mynet)))
        build = code.code_of("nets/mynet.py:build")
        function = system.function_of(build, sources)
        assert system.called(build, sources, function, more=1) == (width + 1, tmp_path / "nets" / "mynet.py")
    assert list(tmp_path.rglob("*.pyc")) == []
