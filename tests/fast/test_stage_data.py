"""Stages with images of their own: what the files say, where each set goes on, and what is wrong."""

from dataclasses import replace

import made_schedules
from facade import Inventory, Schedule, Source, Stage
from hypothesis import given
from hypothesis import strategies as st

from stagerun import language
from stagerun.plan import make_plan

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


def test_a_stage_has_its_own_images_and_all_else_of_the_schedule():
    s = read(two=SMALL, shared=SCHEDULE.replace("} }\nsolver", "} shuffle: false }\nsolver"))
    one, two, three = s.stages
    assert one.data == three.data == s.data
    assert (two.data.train.path, two.data.train.images, two.data.shuffle) == ("/s/small", 500, False)
    assert two.data.val == s.data.val
    assert [stage.solver.max_iter for stage in s.stages] == [20, 10, 20], "an epoch is one of the stage's own images"
    assert [stage.identity["data.train.images"] for stage in s.stages] == ["1000", "500", "1000"]
    assert [source.source for source in s.sources] == ["a", "small", "v"]
    other = read(two='data { val { source: "w" images: 50 } }').stage("two")
    assert other.data.train == s.data.train and [v.source for v in other.data.val] == ["w"]
    assert other.identity == read(shared=SCHEDULE).stage("two").identity, "no snapshot depends on them"


def test_the_same_images_written_once_more_change_nothing():
    plain, said = read(), read(two='data { train { source: "a" images: 1000 } }')
    assert [s.identity for s in plain.stages] == [s.identity for s in said.stages]
    assert language.canonical(plain) == language.canonical(said)
    assert "last_used" not in language.canonical(plain)


def test_which_set_goes_on_is_part_of_the_identity_since_paths_are_not():
    def used(**files: str) -> list[str | None]:
        return [stage.identity.get("data.train.last_used") for stage in read(**files).stages]

    assert used() == [None, None, None]
    assert used(two=SMALL) == [None, "never", "2 stages before"]
    assert used(two=SMALL, three=SMALL.replace("small", "other")) == [None, "never", "never"]
    assert used(two=SMALL + " carry { data: RESTART }") == [None, None, "2 stages before"]


SEVERAL = SCHEDULE.replace(
    'val { source: "v" images: 100 }',
    'val { source: "v" images: 100 name: "v1" } val { source: "w" images: 50 name: "v2" }',
)


def test_of_several_validation_sets_a_change_of_one_field_is_for_the_first():
    s = read("", "", "", SEVERAL, "data.val.images=90")
    assert [(v.name, v.images) for v in s.data.val] == [("v1", 90), ("v2", 50)]
    assert s.stages[0].origins["data.val.v2.images"].text == "50"


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
def test_each_set_has_a_position_of_its_own_along_the_path(draws):
    of = grown(draws)
    found = {planned.stage.name: planned.begins_at for planned in make_plan(of, Inventory()).stages}
    assert found == {name: by_hand(of, name) for name in found}
