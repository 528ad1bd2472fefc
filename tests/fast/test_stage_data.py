"""Stages with images of their own: what the files say, where each set goes on, and what is wrong."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagerun import language
from stagerun.base.errors import RecipeError
from stagerun.base.recipe import LAST_USED, Schedule, Source, Stage
from stagerun.base.snapshots import Inventory
from stagerun.language import resolve
from stagerun.language.stored import read_recipe
from stagerun.plan import make_plan
from stagerun.plan.render import render_text
from tests.help import made_schedules

SCHEDULE = """seed: 1
model { name: "resnet_small" num_classes: 10 }
data { train { source: "a" images: 1000 } val { source: "v" images: 100 } }
solver { batch_size: 100 device_batch_size: 50 base_lr: 0.1 lr_policy: "fixed" max_epoch: 2 test_interval: 5 }
stage { name: "one" }
stage { name: "two" }
stage { name: "three" }
"""
SMALL = 'data { train { source: "small" images: 500 } }'


def read(two: str = "", three: str = "", one: str = "", shared: str = SCHEDULE, *overrides: str) -> Schedule:
    texts = {"schedule.prototxt": shared, "one.prototxt": one, "two.prototxt": two, "three.prototxt": three}
    return language.read(texts, "/s", overrides)


def wrong(**files: str) -> list[tuple[str, int, str, str]]:
    with pytest.raises(RecipeError) as caught:
        read(**files)
    return [(p.span.path, p.span.line, p.message, p.hint) for p in caught.value.problems]


def test_a_stage_has_its_own_images_and_all_else_of_the_schedule() -> None:
    s = read(two=SMALL, shared=SCHEDULE.replace("} }\nsolver", "} shuffle: false }\nsolver"))
    one, two, three = s.stages
    assert one.data == three.data == s.data
    assert (two.data.train.path, two.data.train.images, two.data.shuffle) == ("/s/small", 500, False)
    assert two.data.val == s.data.val
    assert [stage.solver.max_iter for stage in s.stages] == [20, 10, 20], "an epoch is one of the stage's own images"
    assert [stage.identity["data.train.images"] for stage in s.stages] == ["1000", "500", "1000"]
    assert [source.source for source in s.sources] == ["a", "small", "v"]


def test_validation_images_alone_are_replaced_too() -> None:
    s = read(two='data { val { source: "w" images: 50 } }')
    assert s.stage("two").data.train == s.data.train and [v.source for v in s.stage("two").data.val] == ["w"]
    assert s.stage("two").identity == read().stage("two").identity, "no snapshot depends on them"


def test_the_same_images_written_once_more_change_nothing() -> None:
    plain, said = read(), read(two='data { train { source: "a" images: 1000 } }')
    assert [s.identity for s in plain.stages] == [s.identity for s in said.stages]
    assert language.canonical(plain) == language.canonical(said)
    assert "last_used" not in language.canonical(plain)


def test_the_canonical_form_reads_back() -> None:
    two = SMALL.replace("} }", '} val { source: "v" images: 100 name: "x" } val { source: "w" images: 9 name: "y" } }')
    s = read(two=two)
    found = read_recipe(language.canonical(s))
    assert [stage.data for stage in found.stages] == [stage.data for stage in s.stages]
    assert language.canonical(found) == language.canonical(s)


def test_which_set_goes_on_is_part_of_the_identity_since_paths_are_not() -> None:
    def used(**files: str) -> list[str | None]:
        return [stage.identity.get(LAST_USED) for stage in read(**files).stages]

    assert used() == [None, None, None]
    assert used(two=SMALL) == [None, "never", "2 stages before"]
    assert used(two=SMALL, three=SMALL.replace("small", "other")) == [None, "never", "never"]
    assert used(two=SMALL + " carry { data: RESTART }") == [None, None, "2 stages before"]


def test_plan_shows_the_change_and_where_the_images_go_on() -> None:
    s = read(two=SMALL)
    text = render_text(make_plan(s, Inventory()))
    assert "two\n" in text and "  images: trained on small, 500 images, not a" in text
    assert "  images: trained on a, 1000 images, not small" in text
    assert [p.begins_at for p in make_plan(s, Inventory()).stages] == [0, 0, 2000]
    assert "of 1000 or 500 images" in text.splitlines()[0]


def test_a_set_may_be_changed_on_the_command_line() -> None:
    s = read(SMALL, "", "", SCHEDULE, "two.data.train.images=200", "data.val.source=/elsewhere")
    assert s.stage("two").data.train.images == 200 and s.stage("two").solver.max_iter == 4
    assert [stage.data.val[0].path for stage in s.stages] == ["/elsewhere"] * 3


SEVERAL = SCHEDULE.replace(
    'val { source: "v" images: 100 }',
    'val { source: "v" images: 100 name: "v1" } val { source: "w" images: 50 name: "v2" }',
)


def test_of_several_validation_sets_a_change_of_one_field_is_for_the_first() -> None:
    s = read("", "", "", SEVERAL, "data.val.images=90")
    assert [(v.name, v.images) for v in s.data.val] == [("v1", 90), ("v2", 50)]
    assert s.stages[0].origins["data.val.v2.images"].text == "50"


@pytest.mark.parametrize(("files", "where", "text", "hint"), [
    ({"two": 'data { train { images: 5 } }'}, ("two.prototxt", 1), "Source lacks `source`", "source:"),
    ({"two": 'data { train { source: "b" images: 5 name: "x" } }'}, ("two.prototxt", 1), "`name` is for", "remove"),
    ({"two": 'data { train { source: "b" } }'}, ("two.prototxt", 1), "Source lacks `images`", "images: N"),
    ({"two": 'data { shuffle: false }'}, ("two.prototxt", 1), "StageData has no field `shuffle`", ""),
    ({"shared": SEVERAL.replace(' name: "v2"', "")}, ("schedule.prototxt", 3), "one of 2 validation sets has no", "name"),
    ({"shared": SEVERAL.replace('"v2"', '"v1"')}, ("schedule.prototxt", 3), "two validation sets are named `v1`", "line 3"),
    ({"shared": SEVERAL.replace('"v2"', '"a b"')}, ("schedule.prototxt", 3), "can't be the name of a validation", "letters"),
    ({"two": 'data { val { source: "w" images: 3 } } test_iter: 9'}, ("two.prototxt", 1), "more than the 3 of", "leave"),
])  # fmt: skip
def test_mistakes(files: dict[str, str], where: tuple[str, int], text: str, hint: str) -> None:
    found = wrong(**files)
    assert len(found) == 1, found
    assert found[0][:2] == where and text in found[0][2] and hint in found[0][3]


def test_other_classes_than_the_network_has_are_noted_at_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"/s/a": tuple("abcdefghij"), "/s/small": ("cat", "dog")}
    monkeypatch.setattr(resolve, "class_names", lambda path: named.get(path, ()))
    assert language.look_at_classes(read()) == []
    (problem,) = language.look_at_classes(read(two=SMALL))
    assert problem.message == "`num_classes` is 10, but /s/small has 2 classes: cat, dog"
    assert problem.span.line == 2 and "num_classes: 2" in problem.hint


# -- where each set goes on, along the path from the seed

SETS = [Source(source=name, path=f"/{name}", images=images) for name, images in (("a", 1000), ("b", 500), ("c", 700))]


def grown(draws: list[tuple[int, int, int, int, bool]]) -> Schedule:
    """A tree: for each stage its parent (one above it, or the seed), the iteration it starts at, its set, its length, CONTINUE."""
    stages: list[Stage] = []
    for n, (above, at, images, length, carry) in enumerate(draws):
        parent = stages[above % n] if n and above % (n + 1) else None
        at_iter = at % parent.solver.max_iter if parent is not None else 0
        made = made_schedules.stage(
            f"s{n}", parent.name if parent else None, at_iter or None, base_lr=0.1, lr_policy="fixed", max_iter=length,
            carry_data=carry, batch_size=100 + 50 * (n % 2),
        )  # fmt: skip
        stages.append(replace(made, data=replace(made.data, train=SETS[images])))
    return made_schedules.schedule(*stages)


def by_hand(of: Schedule, name: str) -> int:
    """One counter for each set, walked from the seed: a stage resets its own if it restarts, and then counts."""
    path: list[tuple[Stage, int]] = []
    stage, end = of.stage(name), 0
    while True:
        path.insert(0, (stage, end))
        if stage.parent is None:
            break
        end, stage = of.start_iter(stage), of.stage(stage.parent)
    counters = dict.fromkeys((source.path for source in SETS), 0)
    for one, iterations in path:
        if not one.solver.carry_data:
            counters[one.data.train.path] = 0
        if one.name != name:
            counters[one.data.train.path] += iterations * one.solver.batch_size
    return counters[of.stage(name).data.train.path]


TREES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.integers(1, 9), st.booleans()),
    min_size=1,
    max_size=9,
)


@given(TREES)
def test_each_set_has_a_position_of_its_own_along_the_path(draws: list[tuple[int, int, int, int, bool]]) -> None:
    of = grown(draws)
    found = {planned.stage.name: planned.begins_at for planned in make_plan(of, Inventory()).stages}
    assert found == {name: by_hand(of, name) for name in found}
