"""Trees of stages as they are written: iterations of a parent, several parents, sweeps, what is not enabled."""

import pytest
from drawn import examples
from facade import RecipeError, recipe
from hypothesis import given
from hypothesis import strategies as st

from stagerun import language

SHARED = """
name: "tree"
model { name: "resnet18" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "val" images: 200 } }
solver { batch_size: 100 device_batch_size: 10 }
"""
MAIN = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 20\n'
COLLAPSE = 'base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: 5 weight_decay: 1e-4\ntransform_param { crop_size: 24 }\n'


def read(stages: str, changes: tuple[str, ...] = (), **more: str) -> recipe.Schedule:
    texts = {"schedule.prototxt": SHARED + stages, "main.prototxt": MAIN, "collapse.prototxt": COLLAPSE}
    return language.read(texts | {f"{n}.prototxt": t for n, t in more.items()}, "/runs/tree", changes)


MAIN_AND = 'stage { name: "main" } stage { name: "collapse" '


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (MAIN_AND + 'from: "main@20" }', {"main": (None, None), "collapse": ("main", None)}),  # the last iteration is the end
        # Several parents make a stage each, and sweeps of each another.
        (MAIN_AND + 'from: ["main@7", "main", ""] }', {"main": (None, None), "collapse_main_7": ("main", 7), "collapse_main": ("main", None), "collapse_seed": (None, None)}),
        (MAIN_AND + 'from: "main@7" from: "main" sweep { name: "a" } sweep { name: "b" } }', {"main": (None, None), "collapse_main_7_a": ("main", 7), "collapse_main_a": ("main", None), "collapse_main_7_b": ("main", 7), "collapse_main_b": ("main", None)}),
        # A sweep may say where its stages start.
        (MAIN_AND + 'from: "main" sweep { name: "early" from: "main@7" } sweep { name: "each" from: ["main@3", "main"] } }', {"main": (None, None), "collapse_early": ("main", 7), "collapse_main_3_each": ("main", 3), "collapse_main_each": ("main", None)}),
        # A stage follows on the one that a block makes.
        (MAIN_AND + 'sweep { name: "a" } } stage { name: "last" }', {"main": (None, None), "collapse_a": ("main", None), "last": ("collapse_a", None)}),
        # A parent may stand below.
        ('stage { name: "collapse" from: "main@3" } stage { name: "main" from: "" }', {"main": (None, None), "collapse": ("main", 3)}),
        ('stage { name: "a" from: "c" solver: "main.prototxt" } stage { name: "main" from: "" } stage { name: "c" from: "d" solver: "main.prototxt" } stage { name: "d" from: "" solver: "main.prototxt" }', {"d": (None, None), "c": ("d", None), "a": ("c", None), "main": (None, None)}),
    ],
)  # fmt: skip
def test_a_tree(stages, expected):
    schedule = read(stages, last=MAIN)
    assert [(s.name, (s.parent, s.parent_iter)) for s in schedule.stages] == list(expected.items())
    assert {s.group for s in schedule.stages if s.name.startswith("collapse_")} <= {"collapse"}
    assert [path for path, _ in schedule.files].count("collapse.prototxt") <= 1, "a file is read once"


def test_an_iteration_of_the_parent_is_part_of_the_identity():
    schedule = read(MAIN_AND + 'from: "main@7" enabled: false }')
    assert schedule.branch_points("main") == (7,), "its snapshot is taken though no stage that runs starts there"
    stage = schedule.stage("collapse")
    assert stage.identity[recipe.FROM_ITER] == "7" and stage.origins[recipe.FROM_ITER].text == "main@7"
    assert recipe.FROM_ITER not in schedule.stage("main").identity


SWEEP = """stage { name: "main" }
stage {
  name: "collapse" from: "main@7"
  sweep { name: "low" solver { base_lr: 0.05 } }
  sweep { name: "long" solver { max_epoch: 1.2 transform_param { crop_size: 28 } } }
  sweep { name: "late" from: "main" solver { clear: "weight_decay" batch_size: 300 device_batch_size: 60 } }
}
"""


def test_a_sweep_is_a_layer_above_the_stages_file():
    schedule = read(SWEEP)
    solvers = [schedule.stage(f"collapse_{name}").solver for name in ("low", "long", "late")]
    assert [(s.base_lr, s.max_iter, s.transform.crop_size, s.weight_decay, s.logical_workers) for s in solvers] == [
        (0.05, 5, 24, 1e-4, 10),
        (0.1, 12, 28, 1e-4, 10),
        (0.1, 5, 24, 0.0, 5),
    ]
    origins = schedule.stage("collapse_low").origins
    layers = [origins[f"solver.{name}"].layer for name in ("base_lr", "power", "batch_size")]
    assert layers == ["sweep", "stage", "schedule"]
    assert str(origins["solver.base_lr"].span).startswith("schedule.prototxt:9:")


def test_a_stage_written_inside_the_schedule_is_the_one_in_a_file():
    """Same identity and canonical form; places are in schedule.prototxt."""
    own = f'stage {{ name: "main" solver_param {{ {MAIN} }} }}'
    text = SWEEP.replace('stage { name: "main" }', own)
    inside, file = read(text), read(SWEEP)
    assert language.canonical(inside) == language.canonical(file) and language.digest(inside) == language.digest(file)
    assert [s.identity for s in inside.stages] == [s.identity for s in file.stages]
    assert {node.file for node in language.stage_nodes(SHARED + text)} == {None, "collapse.prototxt"}
    rate, batch = (inside.stage("main").origins[f"solver.{name}"] for name in ("base_lr", "batch_size"))
    assert (rate.layer, batch.layer) == ("stage", "schedule")
    assert str(rate.span) == f"schedule.prototxt:6:{own.index('0.1') + 1}"
    assert read(text, ("main.base_lr=0.7",)).stage("main").solver.base_lr == 0.7


def test_a_stage_that_its_sweeps_fill_needs_no_file():
    low, high = (
        f'sweep {{ name: "{name}" solver {{ {MAIN} display: {n} }} }}' for n, name in enumerate(("low", "high"))
    )
    schedule = read(f'stage {{ name: "main" }} stage {{ name: "probe" {low} {high} }}')
    assert [path for path, _ in schedule.files] == ["schedule.prototxt", "main.prototxt"]
    assert schedule.stage("probe_low").identity == schedule.stage("main").identity
    # One entry that fills nothing, and a file that is named.
    for missing in (f'{low} sweep {{ name: "same" }}', f'solver: "probe.prototxt" {low} {high}'):
        with pytest.raises(RecipeError, match="1 mistake") as caught:
            read(f'stage {{ name: "probe" {missing} }}')
        assert "probe.prototxt: no such file" in caught.value.problems[0].message


def test_set_for_the_group_and_for_one_of_it():
    changes = ("collapse.base_lr=0.5", "collapse_low.base_lr=0.7", "collapse_low.transform_param.crop_size=20")
    schedule = read(SWEEP, changes)
    found = {s.name: (s.solver.base_lr, s.solver.transform.crop_size) for s in schedule.stages[1:]}
    assert found == {"collapse_low": (0.7, 20), "collapse_long": (0.5, 28), "collapse_late": (0.5, 24)}
    whole = ("collapse.transform_param.crop_size=20", "collapse_low.transform_param={ crop_size: 26 mirror: true }")
    transform = read(SWEEP, whole).stage("collapse_low").solver.transform
    assert (transform.crop_size, transform.mirror) == (26, True)


def test_below_what_is_not_enabled_nothing_is():
    off = 'stage { name: "a" } stage { name: "b" enabled: false } stage { name: "c" } stage { name: "d" from: "a@3" }'
    enabled = {s.name: s.enabled for s in read(off, a=MAIN, b=MAIN, c=MAIN, d=MAIN).stages}
    assert enabled == {"a": True, "b": False, "c": False, "d": True}


def test_names_and_what_is_enabled_are_not_in_the_digest_and_the_iteration_is():
    def of(text: str) -> str:
        return language.digest(read('stage { name: "main" }' + text, other=COLLAPSE))

    one = of('stage { name: "collapse" from: "main@7" }')
    assert of('stage { name: "other" from: "main@7" enabled: false }') == one
    assert of('stage { name: "collapse" from: "main@7" sweep { name: "x" } }') == one
    assert of('stage { name: "collapse" from: "main@8" }') != one
    assert of('stage { name: "collapse" from: "main" }') != one


@examples(300)
@given(
    st.lists(st.text("@main0123456789 -_", max_size=30) | st.just("main@" + "0" * 30 + "9" * 5000), max_size=4),
    st.lists(st.sampled_from(["a", "b", "main", "main_7", ""]), max_size=3),
)
def test_whatever_is_written_a_mistake_has_its_place(starts, sweeps):
    text = 'stage { name: "main" }\nstage { name: "collapse" '
    text += " ".join(f'from: "{s}"' for s in starts) + " ".join(f' sweep {{ name: "{s}" }}' for s in sweeps) + " }"
    try:
        schedule = read(text)
    except RecipeError as error:
        assert all(p.span.line >= 1 and p.span.column >= 1 and p.message for p in error.problems)
        return
    names = [s.name for s in schedule.stages]
    assert len(names) == len(set(names)) == 1 + max(1, len(starts)) * max(1, len(sweeps))
    assert all(1 <= s.parent_iter < 20 for s in schedule.stages if s.parent_iter is not None)
