"""`model { name: "mynet.py:build" args { ... } }`: the arguments as one text, identity, the recipe in a snapshot, and mistakes."""

import pytest
from test_spec_resolve import SCHEDULE, A, B, read

from stagerun.base.errors import RecipeError
from stagerun.language import arguments, canonical
from stagerun.language.code import digest
from stagerun.language.resolve import read as read_texts
from stagerun.language.stored import read_recipe

MYNET = "import blocks\ndef build(num_classes, width=4): ...\n"


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
        ('model { name: "timm/resnet18" num_classes: 10 args { pretrained: true } }', "fresh weights"),
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
