"""`read_recipe` is the inverse of `canonical`, over every field of every dataclass of recipe."""

import dataclasses
import enum
import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from drawn import examples
from facade import Span, read_recipe, recipe
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from stagerun.language import canonical, load

SOLVERS = Path(__file__).parents[2] / "solvers"
NOWHERE = {"model": None, "identity": {}, "origins": {}, "span": Span("", 1, 1)}

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(allow_nan=False, allow_infinity=False),
}
# Fields that have their defaults when they are read back, many because they were retired.
NOT_IN_THE_TEXT = {
    recipe.Schedule: "files sets class_sizes imports",
    recipe.Stage: "model identity origins span",
    recipe.Ensemble: "span",
    recipe.Model: "spare_classes sources",
    recipe.Loss: "sources",
    recipe.Weights: "state",
    recipe.Data: "on_bad_record scratch_copy scratch_from",
    recipe.Compression: "as_released",
    recipe.Transform: "color_jitter lighting_std",
    recipe.RandAugment: "num_magnitude_bins",
    recipe.RandomResizedCrop: "min_aspect_ratio max_aspect_ratio",
    recipe.Solver: "solverstate_path start_lr",
    recipe.Filler: "mean",
}


def values(wanted: Any) -> st.SearchStrategy[Any]:
    """Every value that a field of this type can have; whether it makes sense is no matter here."""
    if wanted in SCALARS:
        return SCALARS[wanted]
    if get_origin(wanted) in (Union, types.UnionType):
        return st.one_of([st.none() if w is types.NoneType else values(w) for w in get_args(wanted)])
    if get_origin(wanted) is tuple:
        item = get_args(wanted)[0]
        return st.lists(values(item), min_size=item is recipe.Stage, max_size=3).map(tuple)
    if issubclass(wanted, enum.Enum):
        return st.sampled_from(wanted)
    hints, left_out = get_type_hints(wanted), NOT_IN_THE_TEXT.get(wanted, "").split()
    parts = {f.name: values(hints[f.name]) for f in dataclasses.fields(wanted) if f.name not in left_out}
    if wanted is recipe.Stage:
        parts |= {name: st.just(value) for name, value in NOWHERE.items()}
        parts["parent"] = st.none() | TEXT.filter(bool)  # `from: ""` is no parent
    if wanted is recipe.Model:
        parts |= dict.fromkeys(("moving_average_fraction", "eps"), SCALARS[float])
    if wanted is recipe.Ensemble:
        parts["members"] = st.lists(TEXT, min_size=1, max_size=3).map(tuple)
    return st.builds(wanted, **parts)


def without_places(schedule: recipe.Schedule) -> recipe.Schedule:
    stages = tuple(dataclasses.replace(s, **NOWHERE) for s in schedule.stages)
    ensembles = tuple(dataclasses.replace(e, span=NOWHERE["span"]) for e in schedule.ensembles)
    model = dataclasses.replace(schedule.model, sources=None)
    return dataclasses.replace(schedule, model=model, stages=stages, files=(), ensembles=ensembles)


@examples(100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(values(recipe.Schedule))
def test_what_canonical_writes_is_read_back(schedule):
    # Of its own a stage has the images alone.
    own = [dataclasses.replace(schedule.data, train=stage.data.train, val=stage.data.val) for stage in schedule.stages]
    stages = tuple(dataclasses.replace(stage, data=data) for stage, data in zip(schedule.stages, own, strict=True))
    schedule = dataclasses.replace(schedule, stages=stages)
    text = canonical(schedule)
    read = read_recipe(text)
    assert canonical(read) == text
    assert without_places(read) == schedule
    assert all(stage.model == (stage.solver.model or read.model) for stage in read.stages)


STORED = canonical(load(SOLVERS / "fashion_collapse"))


def test_a_field_that_an_older_stagerun_did_not_write_has_its_default():
    younger = ("compile", "adapt", "zero_gamma", "ema_interval", "determinism", "display")
    older = "".join(line for line in STORED.splitlines(True) if line.split(":")[0].strip() not in younger)
    assert older != STORED
    read = read_recipe(older)
    assert read.stages[0].solver.ema_interval == 1 and read.stages[0].solver.display == 100
    assert read.model.zero_gamma is recipe.ZeroGamma.AS_PUBLISHED and read.determinism is recipe.Determinism.FIXED


@pytest.mark.parametrize(
    "before, after, message",
    [
        ("  num_classes: 10\n", "", r"line 3: Model lacks `num_classes`"),
        ("  num_classes: 10\n", "  num_classes: 10\n  colour: 3\n", r"line 6: Model has no field `colour`"),
        ("  num_classes: 10\n", "  num_classes: 10\n  num_classes: 10\n", r"line 6: `num_classes` a second time"),
        ("num_classes: 10", "num_classes: ten", r"line 5: `num_classes` can't be `ten`"),
        ("num_classes: 10", "num_classes: 10.5", r"line 5: `num_classes` can't be `10.5`"),
        ("num_classes: 10", "num_classes { a: 1 }", r"line 5: `num_classes` is of another kind"),
        ("channels_last: true", "channels_last: yes", r"`channels_last` can't be `yes`"),
        ("warmup_start_lr: 0.", "warmup_start_lr: 1e999 #", r"`warmup_start_lr` can't be `1e999`"),
        ("determinism: FIXED", "determinism: LOOSE", r"`determinism` can't be `LOOSE`"),
        ('name: "fashion_collapse"', "name: fashion_collapse", r"line 1: `name` can't be `fashion_collapse`"),
        ('name: "fashion_collapse"', 'name: "fashion\\q"', r"line 1: `name` can't be"),
        ("model {", "model", r"line 3: `model` is not a field"),
        ("seed: 1", "seed:", r"line 3: `\{` is not a field|`seed` can't be"),
    ],
)
def test_any_other_text_is_refused_with_its_line(before, after, message):
    assert before in STORED
    with pytest.raises(ValueError, match=message):
        read_recipe(STORED.replace(before, after, 1))


CUT = STORED[: STORED.rindex("}")]


@pytest.mark.parametrize(
    "text", ["", "}", "{", "model {" * 100_000, "name", 'name: "', "\0", "seed: " + "9" * 5000, CUT]
)
def test_no_text_breaks_the_reader(text):
    with pytest.raises(ValueError):
        read_recipe(text)
