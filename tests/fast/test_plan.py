"""A plan for programs; `test_plan_cases` shows which stages it finds done, stale, or where they go on, cases/plan_* what it prints."""

import json

from facade import Inventory, Schedule, SnapshotRef, render_json
from made_schedules import snapshot as snapshot

from stagerun.language import read
from stagerun.plan import make_plan
from stagerun.plan.counting import changed_fields

SCHEDULE = """
name: "tree"
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } }
solver { batch_size: 100 device_batch_size: 50 transform_param { crop_size: 28 } }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "long" }
stage { name: "early" from: "trunk" }
"""
STAGES = {
    "trunk": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 20\n',
    "long": 'base_lr: 0.1\nlr_policy: "fixed"\nmax_iter: 30\n',
    "collapse": 'base_lr: 0.1\nlr_policy: "poly"\npower: 2\nmax_iter: 10\n',
    "early": 'base_lr: 0.1\nlr_policy: "poly"\npower: 1\nmax_iter: 5\n',
}


def schedule(*, shared: str = SCHEDULE, **stages: str) -> Schedule:
    """The tree, with other files for some stages."""
    texts = {"schedule.prototxt": shared.encode()}
    texts |= {f"{name}.prototxt": text.encode() for name, text in {**STAGES, **stages}.items()}
    return read(texts, "/s", [])


def inventory(*refs: SnapshotRef) -> Inventory:
    return Inventory(tuple(sorted(refs, key=lambda r: (r.attempt, r.iter, r.stage))))


def test_json_has_the_least_where_a_stage_may_end_early():
    shared = SCHEDULE.replace("images: 1000 }", 'images: 1000 } val { source: "/d/val" images: 100 }')
    stops = STAGES["long"] + "test_interval: 4 early_stop { metric: LOSS patience_iter: 6 }"
    whole = json.loads(render_json(make_plan(schedule(shared=shared, long=stops), Inventory())))
    assert (whole["least_iterations"], whole["iterations"], whole["least_iterations_left"]) == (47, 65, 47)
    without = json.loads(render_json(make_plan(schedule(), Inventory())))
    assert not [name for name in (*without, *without["stages"][0]) if "least" in name]


def test_without_a_stage_that_starts_from_its_best_a_stage_of_images_with_several_labels_stays():
    shared = (
        SCHEDULE.replace("images: 1000 }", 'images: 1000 labels: "float_data" } val { source: "/d/val" images: 9 labels: "float_data" }')
        .replace("solver {", "solver { loss { type: BINARY } test_interval: 5")
    )  # fmt: skip
    recorded = schedule(shared=shared.replace('from: "trunk"', 'from: "trunk@best"')).stage("trunk")
    assert "data.val.labels_digest" in recorded.identity
    end = SnapshotRef(name="trunk", stage="trunk", iter=20, attempt=1, id="1", parent="", identity=recorded.identity)
    assert changed_fields(end, schedule(shared=shared).stage("trunk")) == []
