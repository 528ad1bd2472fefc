"""`model { name: "mynet.py:build" args { ... } }`: the arguments as one text, identity, the recipe in a snapshot, and mistakes."""

import ast

import pytest
from test_spec_resolve import SCHEDULE, A, B, read

from stagerun.base.errors import RecipeError
from stagerun.language import arguments, canonical
from stagerun.language.code import digest
from stagerun.language.resolve import read as read_texts
from stagerun.language.signature import signature
from stagerun.language.stored import read_recipe

MYNET = "import blocks\ndef build(num_classes, width=4, **more): ...\n"


def texts(model: str, **more: str) -> dict[str, str]:
    start = SCHEDULE.index("model {")
    schedule = SCHEDULE[:start] + model + SCHEDULE[SCHEDULE.index("}", start) + 1 :]
    return {"schedule.prototxt": schedule, "a.prototxt": A, "b.prototxt": B, "mynet.py": MYNET, "blocks.py": "", **more}


def said(model: str, *overrides: str, **more: str) -> list[str]:
    with pytest.raises(RecipeError) as wrong:
        read_texts(texts(model, **more), "/d/s", overrides)
    return [f"{p.span}: {p.message}" for p in wrong.value.problems]


def test_arguments_have_one_text_however_they_are_written() -> None:
    for args in (
        'args { width: 8 act: "gelu" big: true p: 0.1 depths: [1, 2] }',
        "args: { depths: [1,2]; p: 1e-1, big: true act: 'gelu'\n width: 8 }",
    ):
        schedule = read_texts(texts(f'model {{ name: "mynet.py:build" num_classes: 10 {args} }}'), "/d/s")
        assert schedule.model.args == '{ act: "gelu" big: true depths: [1, 2] p: 0.1 width: 8 }'
    found = arguments.read(schedule.model.args)
    assert found == {"act": "gelu", "big": True, "depths": (1, 2), "p": 0.1, "width": 8}
    assert [type(v) for v in found.values()] == [str, bool, tuple, float, int]
    stored = read_recipe(canonical(schedule))
    assert stored.model.args == schedule.model.args
    assert stored.model.moving_average_fraction is None and stored.model.sources is None


def test_a_stage_depends_on_each_file_that_it_needs() -> None:
    schedule = read_texts(texts('model { name: "mynet.py:build" num_classes: 10 }', unused="x"), "/d/s")
    code = {k: v for k, v in schedule.stages[0].identity.items() if k.startswith("code.")}
    assert code == {"code.mynet.py": digest([("mynet.py", MYNET)]), "code.blocks.py": digest([("blocks.py", "")])}
    assert [path for path, _ in schedule.python.files] == ["blocks.py", "mynet.py"]
    assert "model.args" not in schedule.stages[0].identity
    assert not [k for k in read(SCHEDULE).stages[0].identity if k.startswith(("code.", "model.args"))]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ('model { name: "mynet.py:build" num_classes: 10 args { width: 8 width: 9 } }', "`width` is given twice"),
        ('model { name: "mynet.py:build" num_classes: 10 args { width: { a: 1 } } }', "`width` is a message, and arguments hold none"),
        ('model { name: "mynet.py:build" num_classes: 10 args { width: big } }', "not `big`"),
        ('model { name: "mynet.py:build" num_classes: 10 args { class: 1 } }', "`class` can't be the name of an argument"),
        ('model { name: "mynet.py:build" num_classes: 10 args { width: 1e999 } }', "`width` must be finite"),
        ('model { name: "mynet.py:build" num_classes: 10 args { } }', "`args` is empty"),
        ('model { name: "mynet.py:build" num_classes: 10 args: "x" }', "`args` is `{ name: value ... }`"),
        ('model { name: "mynet.py:build" num_classes: 10 args { channels: 1 } }', "`channels` in `args`"),
        ('model { name: "resnet18" num_classes: 10 args { width: 1 } }', "`args` means nothing for `resnet18`"),
        ('model { name: "timm/resnet18" num_classes: 10 args { pretrained: true } }', "called with listed arguments alone, which open no file, and not with `pretrained`"),
        ('model { name: "timm/resnet18" num_classes: 10 args { checkpoint_path: "x.pth" } }', "and not with `checkpoint_path`"),
        ('model { name: "timm/../x" num_classes: 10 }', "`timm/../x` is not a network of timm"),
        ('model { name: "../mynet.py:build" num_classes: 10 }', "is not below the schedule's folder"),
        ('model { name: "mynet.py" num_classes: 10 }', "names a file and no function in it"),
        ('model { name: "mynet.py:build" num_classes: 10 blur_pool: true }', "`blur_pool` means nothing"),
    ],
)  # fmt: skip
def test_mistakes(model: str, expected: str) -> None:
    (one,) = said(model)
    assert expected in one and one.startswith("schedule.prototxt:")


def test_a_mistake_on_the_command_line_points_into_it() -> None:
    (one,) = said('model { name: "mynet.py:build" num_classes: 10 }', "model.args={width: 1.b}")
    assert one.startswith("--set:1:13: `width` is a number")


CALLS = """
def build(num_classes, channels, width=4, *, depth): ...
class Net(nn.Module):
    def __init__(self, num_classes, width): ...
class Loss:
    def __init__(self, gamma, num_classes=0): ...
def focal(logits, targets, gamma=2.0): ...
def others(num_classes, **more): ...
def one(image): ...
def three(image, rng, strength): ...
def fine(image, rng, strength=1): ...
"""
MODEL = 'model {{ name: "mynet.py:{}" num_classes: 10 {} }}'
LOSS = 'solver.loss={{ type: PYTHON function: "mynet.py:{}" {} }}'


@pytest.mark.parametrize(
    ("function", "args", "expected"),
    [
        ("build", "args { widht: 8 depth: 1 }", ["3:55 `build` in mynet.py:2 takes no `widht` (did you mean `width`?)"]),
        ("build", "args { blocks: 8 depth: 1 }", ["3:55 `build` in mynet.py:2 takes no `blocks` (it takes `width` and `depth`)"]),
        ("build", "", ["3:15 `build` in mynet.py:2 needs `depth` (write `args { depth: ... }`)"]),
        ("Net", "args { height: 8 }", ["3:15 `Net` in mynet.py:4 needs `width` (write `args { width: ... }`)", "3:53 `Net` in mynet.py:4 takes no `height` (it takes `width`)"]),
        ("others", "args { anything: 8 }", []),
        ("build", "args { depth: 8 }", []),
        ("Net", "args { width: 8 }", []),
    ],
)  # fmt: skip
def test_arguments_that_a_function_does_not_take_are_mistakes_without_an_import(
    function: str, args: str, expected: list[str]
) -> None:
    assert calls(f"\n\n{MODEL.format(function, args)}") == expected


def calls(model: str, *overrides: str) -> list[str]:
    """`LINE:COLUMN MESSAGE (HINT)` of each mistake in a schedule whose Python is `CALLS`."""
    start = SCHEDULE.index("model {")
    schedule = model + SCHEDULE[SCHEDULE.index("}", start) + 1 :]
    files = {"schedule.prototxt": schedule, "a.prototxt": A, "b.prototxt": B, "mynet.py": CALLS}
    try:
        read_texts(files, "/d/s", overrides)
    except RecipeError as wrong:
        return [f"{p.span.line}:{p.span.column} {p.message} ({p.hint})" for p in wrong.problems]
    return []


def test_the_functions_of_a_loss_and_of_images_are_looked_at_as_well() -> None:
    model = MODEL.format("Net", "args { width: 8 }")
    assert calls(model, LOSS.format("Loss", "args { gamma: 1 }")) == []
    (wrong,) = calls(model, LOSS.format("Loss", "args { gama: 1 gamma: 2 }"))
    assert wrong.endswith("takes no `gama` (did you mean `gamma`?)")
    (missing,) = calls(model, LOSS.format("focal", ""))
    assert "`focal` in mynet.py:7 needs `logits` and `targets`" in missing and "called once" in missing
    assert calls(model, 'solver.transform_param.python="mynet.py:fine"') == []
    for function in ("one", "three"):
        (wrong,) = calls(model, f'solver.transform_param.python="mynet.py:{function}"')
        assert f"`{function}` in mynet.py:" in wrong and "an image and a numpy Generator" in wrong


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
    ],
)
def test_nothing_is_said_of_a_function_that_may_be_another(text: str) -> None:
    assert signature(ast.parse(text), "build") is None
