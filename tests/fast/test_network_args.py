"""Python that a schedule names: arguments as one text, the files that a function takes, identity, and the recipe in a snapshot.
Mistakes: golden/spec/network_*, python_*."""

import pytest
from facade import read_recipe, recipe
from test_spec_resolve import SCHEDULE, A, B

from stagerun.language import canonical, read

MYNET = "import blocks\ndef build(num_classes, width=4, **more): ...\n"
FILES = {"mynet.py": MYNET, "blocks.py": ""}


def schedule(model: str, files: dict[str, str] = FILES) -> recipe.Schedule:
    start = SCHEDULE.index("model {")
    text = f"{SCHEDULE[:start]}model {{ {model} num_classes: 10 }}{SCHEDULE[SCHEDULE.index('}', start) + 1 :]}"
    return read({"schedule.prototxt": text, "a.prototxt": A, "b.prototxt": B, **files}, "/d/s")


def code(of: recipe.Schedule) -> dict[str, str]:
    return {k: v for k, v in of.stages[0].identity.items() if k.startswith("code.")}


def test_arguments_have_one_text_however_they_are_written():
    for args in (
        'args { width: 8 act: "gelu" big: true p: 0.1 depths: [1, 2] }',
        "args: { depths: [1,2]; p: 1e-1, big: true act: 'gelu'\n width: 8 }",
    ):
        made = schedule(f'name: "mynet.py:build" {args}')
        stored = read_recipe(canonical(made)).model
        assert made.model.args == stored.args == '{ act: "gelu" big: true depths: [1, 2] p: 0.1 width: 8 }'
        assert (stored.moving_average_fraction, stored.sources) == (None, None)


def test_a_stage_depends_on_each_file_that_it_needs_and_on_every_edit_of_it():
    made = schedule('name: "mynet.py:build"', FILES | {"unused.py": "def ("})
    before, edited = code(made), code(schedule('name: "mynet.py:build"', FILES | {"blocks.py": "# one"}))
    assert before.keys() == {"code.mynet.py", "code.blocks.py"} and "model.args" not in made.stages[0].identity
    assert {name for name in before if edited[name] != before[name]} == {"code.blocks.py"}
    assert not [k for k in schedule('name: "resnet18"').stages[0].identity if k.startswith(("code.", "model.args"))]


def test_the_files_of_a_function_are_all_that_it_imports_below_the_folder():
    files = {
        "nets/mynet.py": "import torch.nn\nfrom . import blocks\ndef build():\n    import layers.norm as n\n",
        "nets/__init__.py": "",
        "nets/blocks.py": "from ..outside import x\nfrom .deep.a import b\n",
        "nets/deep/a.py": "from nets import mynet\n",
        "layers/norm.py": "if 1:\n    from helpers import *\n",
        "helpers.py": "import helpers\n",
        "outside.py": "",
        "unused.py": "def (",
    }
    found = schedule('name: "nets/mynet.py:build"', files).python.files
    assert [path for path, _ in found] == sorted(files.keys() - {"unused.py"})


@pytest.mark.parametrize(
    "text",
    [
        "@cache\ndef build(width): ...",
        "def build(width): ...\nbuild = jit(build)",
        "def build(width): ...\ndel build",
        "if new:\n    def build(width): ...\nelse:\n    def build(depth): ...",
        "from blocks import *\ndef build(width): ...",
        "def build(width): ...\nglobals().update(build=print)",
        "def build(width): ...\ndef change():\n    global build\n    build = print",
        "def build(width, /): ...",
        "@dataclass\nclass build:\n    width: int",
        "class build(Base): ...",
        "class build(metaclass=Meta):\n    def __init__(self, width): ...",
        "class build:\n    def __new__(cls): ...\n    def __init__(self, width): ...",
        "class build:\n    @wrapped\n    def __init__(self, width): ...",
        "class build:\n    def __init__(self, width): ...\nbuild.__init__ = print",
        "async def build(width): ...",
        "import build",
        "build = print",
        "from os.path import join as build",
        "from x import *",
        "try:\n    import build\nexcept ImportError:\n    build = None",
    ],
)
def test_nothing_is_said_of_a_function_that_may_be_another(text):
    assert code(schedule('name: "mynet.py:build" args { nothing: 1 }', {"mynet.py": text, "blocks.py": ""}))


def test_nothing_is_said_of_a_package_that_may_be_installed_elsewhere():
    assert schedule('name: "ournet:build"', {}).model.name == "ournet:build"
