"""What `check` finds, what it passes over, and how a comment silences it: each rule by itself."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from click.testing import CliRunner

from stagerun import language
from stagerun.base.recipe import Schedule
from stagerun.cli import main
from stagerun.tools.lint import RULES, lint, problems
from stagerun.tools.lint.finding import comments_of

SOLVERS = Path(__file__).parents[2] / "solvers"

# 10 iterations are an epoch; nothing to find.
SCHEDULE = """# head
model { name: "resnet18" num_classes: 10 }
data { train { source: "train" images: 1000 } val { source: "val" images: 200 } }
solver {
  batch_size: 100 device_batch_size: 10 momentum: 0.9 weight_decay: 1e-4 snapshot: 10
  transform_param { crop_size: 24 mean_value: 104 scale: 0.01 }
}
stage { name: "a" }
stage { name: "b" }
"""
ELASTIC = SCHEDULE.replace("solver {", "determinism: ELASTIC solver {")
A = 'base_lr: 0.1\nlr_policy: "poly_cyc"\npower: 1\nmax_iter: 100\nlr_iter: 200\n'  # 0.1 -> 0.05
B = 'base_lr: 0.05\nlr_policy: "poly"\npower: 2\nmax_iter: 50\n'
KNOTS = 'lr_policy: "piecewise_linear" knot { epoch: 0 factor: 1 } knot { epoch: 5 factor: 1 }'
LARGE = SCHEDULE.replace("batch_size: 100 device", "batch_size: 4096 device").replace("images: 1000 ", "images: 40960 ")
LARGE = LARGE.replace("device_batch_size: 10", "device_batch_size: 32")
NO_DECAY = LARGE.replace("momentum: 0.9", "momentum: 0.9 param { kind: NORM decay_mult: 0 }")
LARGE_A = A.replace("0.1", "1.6").replace("base_lr", "warmup_iter: 2 base_lr", 1)
LARGE_B = B.replace("0.05", "0.8")
COSINE = 'base_lr: 0.05 lr_policy: "cosine" max_iter: 50 warmup_iter: 10 warmup_start_lr: 0.05'
IMAGES = "transform_param { crop_size: 24 mean_value: 104 scale: 0.01 }"


def images(transform: str, tested: str = "", **more: str) -> dict[str, str]:
    """Stage b with a transform of its own."""
    return {
        "b": f"{B}transform_param {{ {transform} }}"
        + (f" test_transform_param {{ {tested} }}" if tested else "")
        + ' clear: "transform_param"',
        **more,
    }


def seeded(transform: str) -> dict[str, str]:
    return {"schedule": SCHEDULE.replace(IMAGES, f"transform_param {{ {transform} }}")}


# One line of steps for both stages.
STEPS = SCHEDULE.replace("snapshot: 10", "snapshot: 10 stepvalue: [40, 100] gamma: 0.5")
FALLS = 'base_lr: 0.1 lr_policy: "multistep" max_iter: 50'


def read(schedule: str = SCHEDULE, a: str = A, b: str = B, changes: tuple[str, ...] = (), **more: str) -> Schedule:
    texts = {"schedule.prototxt": schedule, "a.prototxt": a, "b.prototxt": b}
    return language.read(texts | {f"{n}.prototxt": t for n, t in more.items()}, "/runs/small", changes)


def found(**texts: object) -> list[str]:
    """`id path:line:column` of each finding."""
    return [f"{f.id} {f.span}" for f in lint(read(**texts))]  # type: ignore[arg-type]


def test_nothing_to_find() -> None:
    assert found() == []
    assert found(schedule=NO_DECAY, a=LARGE_A, b=LARGE_B) == []


# Per rule: what fires, and where.
FIRES = {
    "lr-jump": [
        ({"b": B.replace("0.05", "0.2")}, "b.prototxt:1:10"),
        ({"b": B.replace("0.05", "0.5") + "warmup_iter: 5\nwarmup_start_lr: 0.4"}, "b.prototxt:6:18"),
        ({"b": B.replace("poly", "inv") + "gamma: 1 warmup_iter: 20"}, "b.prototxt:5:23"),
        ({"schedule": SCHEDULE.replace('name: "b"', 'name: "b" from: "a@20"'), "b": B.replace("0.05", "0.3")}, "b.prototxt:1:10"),
        ({"b": 'base_lr: 0.05 max_iter: 50\nlr_policy: "multistep" stepvalue: [20, 40] gamma: 10'}, "b.prototxt:2:51"),
        ({"b": f'base_lr: 0.05 max_iter: 100\n{KNOTS} knot {{ epoch: 5 factor: 50 }}'}, "b.prototxt:2:31"),
        ({"b": 'base_lr: 0.05 max_iter: 50 warmup_iter: 5 decay_from: WARMUP_END\nlr_policy: "step" stepsize: 20 gamma: 10'}, "b.prototxt:2:39"),
    ],
    "warmup-start": [
        ({"a": A + "warmup_iter: 10 warmup_start_lr: 0.2"}, "a.prototxt:6:34"),
        ({"schedule": SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 warmup_start_lr: 0.12"), "a": A + "warmup_iter: 10"}, "schedule.prototxt:5:72"),
    ],
    "zero-parent": [
        ({"a": A.replace("200", "100")}, "b.prototxt:1:10"),
        ({"a": 'base_lr: 0.1 lr_policy: "cosine" max_iter: 100'}, "b.prototxt:1:10"),
    ],
    "never-reached": [
        ({"b": 'base_lr: 0.05 max_iter: 50\nlr_policy: "multistep" stepvalue: [20, 60] gamma: 0.1'}, "b.prototxt:2:36"),
        ({"b": 'base_lr: 0.05 max_iter: 50 warmup_iter: 5 decay_from: WARMUP_END\nlr_policy: "step" stepsize: 45 gamma: 0.1'}, "b.prototxt:2:29"),
        ({"b": f"base_lr: 0.05 max_iter: 80\n{KNOTS} knot {{ epoch: 10 factor: 0 }}"}, "b.prototxt:2:31"),
        ({"schedule": STEPS, "a": FALLS, "b": FALLS}, "schedule.prototxt:5:99"),
        ({"b": B + "transform_param { crop_size_ramp_param { start_size: 12 end_epoch: 9 multiple: 4 } }"}, "b.prototxt:5:68"),
    ],
    "lr-batch": [
        ({"schedule": NO_DECAY, "a": LARGE_A.replace("1.6", "16"), "b": LARGE_B}, "a.prototxt:1:25"),
        ({"schedule": NO_DECAY, "a": LARGE_A, "b": LARGE_B.replace("0.8", "48") + "warmup_iter: 5"}, "b.prototxt:1:10"),
        ({"schedule": NO_DECAY.replace("momentum: 0.9", 'momentum: 0.9 type: "LARS"'), "a": LARGE_A, "b": LARGE_B}, "a.prototxt:1:25"),
    ],
    "decay-on-norm": [
        ({"schedule": LARGE, "a": LARGE_A, "b": LARGE_B}, "schedule.prototxt:5:70"),
        ({"schedule": NO_DECAY, "a": LARGE_A, "b": LARGE_B + "param { } param { kind: NORM decay_mult: 0 } weight_decay: 2e-4"}, "b.prototxt:5:60"),
        ({"schedule": SCHEDULE.replace("momentum: 0.9", 'momentum: 0.9 type: "LARS"')}, "schedule.prototxt:5:82"),
    ],
    "batch-images": [
        ({"schedule": SCHEDULE.replace("images: 1000", "images: 99")}, "schedule.prototxt:5:15"),
        ({"b": B.replace("0.05", "0.4") + "batch_size: 1010"}, "b.prototxt:5:13"),
    ],
    "unsaved-work": [
        ({"a": A.replace("100", "100000").replace("200", "200000") + 'clear: "snapshot"'}, "a.prototxt:4:11"),
        ({"b": B + "snapshot: 51"}, "b.prototxt:5:11"),
    ],
    "unread-field": [
        ({"b": B + "stepvalue: 30"}, "b.prototxt:5:12"),
        ({"a": A + "warmup_start_lr: 0.01"}, "a.prototxt:6:18"),
        ({"schedule": SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 momentum2: 0.9")}, "schedule.prototxt:5:66"),
        ({"b": B + "test_iter: 5"}, "b.prototxt:5:12"),
        ({"b": B + "max_nan: 5"}, "b.prototxt:5:10"),
        ({"b": B + "average_loss: 5"}, "b.prototxt:5:15"),
        ({"b": B + "local_gw_ratio: 0.1"}, "b.prototxt:5:17"),
        ({"b": B + 'weight_decay: 0 regularization_type: "L1"'}, "b.prototxt:5:38"),
        ({"b": B + "param { kind: NORM adapt: false }"}, "b.prototxt:5:1"),
        ({"b": B + 'weight_decay: 0 local_lr_auto: true param { name: "fc.*" lr_mult: 2 }'}, "b.prototxt:5:37"),
        ({"schedule": SCHEDULE.replace('"b" }', '"b" sweep { name: "x" solver { gamma: 2 } } sweep { name: "y" } }')}, "schedule.prototxt:9:53"),
    ],
    "warmup-cut": [({"b": COSINE}, "b.prototxt:1:26")],
    "doubtful-value": [
        ({"schedule": SCHEDULE.replace("momentum: 0.9", 'type: "AdamW"')}, "schedule.prototxt:5:47"),
        ({"b": B + "ema_decay: 0.96 ema_interval: 2"}, "b.prototxt:5:12"),
        ({"b": B + "ema_decay: 0.5 ema_interval: 51"}, "b.prototxt:5:30"),
        ({"b": B + 'type: "RMSProp" delta: 0'}, "b.prototxt:5:24"),
    ],
    "other-numbers": [
        (images("crop_size: 24 mean_value: 104 scale: 0.0102"), "b.prototxt:5:30"),
        (images("crop_size: 24 mean_value: 104 scale: 0.01", "crop_size: 24 mean_value: 100 scale: 0.01"), "b.prototxt:5:30"),
    ],
    "odd-range": [
        (seeded("crop_size: 24"), "schedule.prototxt:6:32"),
        (seeded("mean_value: [0.485, 0.456, 0.406] std_value: [0.229, 0.224, 0.225]"), "schedule.prototxt:6:34"),
        (seeded("mean_value: 104 std_value: 58 scale: 0.0039"), "schedule.prototxt:6:48"),
    ],
    "channel-order": [
        (seeded("mean_value: [123.675, 116.28, 103.53] scale: 0.01"), "schedule.prototxt:6:34"),
        (seeded("channel_order: RGB mean_value: [104, 117, 123] scale: 0.01"), "schedule.prototxt:6:36"),
        ({"a": A + 'weights { file: "torchvision/resnet18" drop: "fc.*" }'}, "schedule.prototxt:6:47"),
    ],
    "other-sizes": [
        (images("crop_size: 24 mean_value: 104 scale: 0.01", "random_resize_param { min_size: 28 } crop_size: 24 mean_value: 104 scale: 0.01"), "b.prototxt:5:30"),
        (images("random_resized_crop_param {} crop_size: 24 mean_value: 104 scale: 0.01"), "b.prototxt:5:59"),
        (images("crop_size: 28 mean_value: 104 scale: 0.01", "crop_size: 24 mean_value: 104 scale: 0.01"), "b.prototxt:5:30"),
    ],
    "compress-alone": [
        ({"b": B + "device_batch_size: 100 compress_param { method: TOP_K }"}, "b.prototxt:5:49"),
        ({"schedule": SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 compress_param { method: AUTO }"), "b": B + "device_batch_size: 100"}, "schedule.prototxt:5:80"),
    ],
    "compress-more": [
        ({"b": B + "compress_param { method: TOP_K ratio: 0.97 }"}, "b.prototxt:5:39"),
        ({"b": B + "compress_param { method: RANDOM_K ratio: 1 }"}, "b.prototxt:5:42"),
        ({"schedule": ELASTIC.replace("device_batch_size: 10", "device_batch_size: 5"), "b": B + "compress_param { method: TOP_K ratio: 0.25 }"}, "b.prototxt:5:39"),
        ({"schedule": ELASTIC, "b": B + "compress_param { method: TOP_K ratio: 0.4 }"}, "b.prototxt:5:39"),
    ],
    "no-memory": [
        ({"b": B + "compress_param { method: TOP_K memory: NONE }"}, "b.prototxt:5:40"),
    ],
    "one-replica": [({"b": B + "sync_param { method: LOCAL replicas: 1 period: 8 }"}, "b.prototxt:5:38")],
    "period-beyond": [
        ({"b": B + "sync_param { method: LOCAL replicas: 2 period: 51 }"}, "b.prototxt:5:48"),
        ({"b": B + "warmup_iter: 3 warmup_start_lr: 0.01 sync_param { method: DILOCO replicas: 2 period: 48 }"}, "b.prototxt:5:86"),
    ],
    "staleness-waits": [({"b": B + "sync_param { method: ASYNC replicas: 4 max_staleness: 2 }"}, "b.prototxt:5:55")],
    "no-test": [
        ({"schedule": SCHEDULE.replace('val { source: "val" images: 200 }', "")}, "schedule.prototxt:3:24"),
    ],
}  # fmt: skip

# What looks alike and is no finding.
PASSES = {
    "lr-jump": [
        {"b": B.replace("0.05", "0.14")},
        {"b": B + "warmup_iter: 5"},  # from 0.05 to 0, and up
        {"b": f"base_lr: 0.05 max_iter: 100\n{KNOTS} knot {{ epoch: 5.3 factor: 50 }}"},  # a ramp
        {"b": 'base_lr: 0.05 max_iter: 50\nlr_policy: "multistep" stepvalue: [20, 70] gamma: 3'},
        {"b": f'base_lr: 0.05 max_iter: {2**63 - 1}\nlr_policy: "step" stepsize: 1 gamma: 1'},
        {"b": B.replace("0.05", "0.4") + "batch_size: 800"},  # the same for each image
        {"b": B.replace("0.05", "0.001") + 'type: "Adam"'},
        {"a": A.replace("poly_cyc", "plateau") + "gamma: 0.1 plateau_winsize: 10", "b": B.replace("0.05", "0.001")},
        {"schedule": SCHEDULE.replace('"b"', '"b" from: ""'), "b": B.replace("0.05", "0.9")},
    ],
    "warmup-start": [
        {"a": A + "warmup_iter: 10 warmup_start_lr: 0.1"},
    ],
    "zero-parent": [
        {"a": A.replace("200", "110").replace("power: 1", "power: 2"), "b": B.replace("0.05", "0.001")},
        {
            "a": A.replace("200", "100"),
            "schedule": SCHEDULE.replace('"b"', '"b" from: "a@90"'),
            "b": B.replace("0.05", "0.01"),
        },
    ],
    "never-reached": [
        {"b": 'base_lr: 0.05 max_iter: 50 lr_policy: "multistep" stepvalue: [20, 49] gamma: 0.1'},
        {"b": 'base_lr: 0.05 max_iter: 50 policy_start_iter: 11 lr_policy: "multistep" stepvalue: 60 gamma: 0.1'},
        {"b": f"base_lr: 0.05 max_iter: 80 {KNOTS} knot {{ epoch: 8.04 factor: 0 }}"},
        {"a": A.replace("200", "1000")},  # a cycle that is cut is what poly_cyc is for
        {"schedule": STEPS, "a": FALLS, "b": FALLS + " policy_start_iter: 51"},  # each has its part of one line
    ],
    "lr-batch": [
        {"a": A.replace("0.1", "16"), "b": B.replace("0.05", "8")},  # batch 100
        {"schedule": NO_DECAY, "a": LARGE_A, "b": LARGE_B.replace("0.8", "0.08")},  # a collapse
        {"schedule": NO_DECAY.replace("momentum: 0.9", 'momentum: 0.9 type: "LARS"'), "a": LARGE_A.replace("1.6", "10"), "b": LARGE_B.replace("0.8", "5")},
        {"schedule": NO_DECAY.replace("momentum: 0.9", 'momentum: 0.9 type: "LAMB"'), "a": LARGE_A.replace("1.6", "0.01"), "b": LARGE_B.replace("0.8", "0.01")},
        {"schedule": NO_DECAY, "a": LARGE_A.replace("1.6", "0.1") + "base_lr_batch: 256", "b": LARGE_B},
    ],
    "decay-on-norm": [
        {"schedule": LARGE.replace("1e-4", "0"), "a": LARGE_A, "b": LARGE_B},
        {"schedule": LARGE.replace("resnet18", "vgg11").replace("crop_size: 24", "crop_size: 64"), "a": LARGE_A, "b": LARGE_B},
        {"schedule": LARGE.replace("momentum: 0.9", 'momentum: 0.9 param { name: "*bn*" decay_mult: 0 }'), "a": LARGE_A, "b": LARGE_B},
    ],
    "batch-images": [{"schedule": SCHEDULE.replace("images: 1000", "images: 100")}],
    "unread-field": [
        {"schedule": SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 lr_iter: 200"), "a": A.replace("lr_iter: 200", "")},
        {"schedule": SCHEDULE.replace("momentum: 0.9", "momentum: 0.9 warmup_start_lr: 0.01"), "b": B + "warmup_iter: 2"},
        {"changes": ("b.stepvalue=30",)},
    ],
    "warmup-cut": [
        {"b": COSINE + " decay_from: WARMUP_END"},
        {"b": COSINE.replace("cosine", "poly") + " power: 1"},  # Caffe's
    ],
    "doubtful-value": [
        {"schedule": SCHEDULE.replace("momentum: 0.9", 'type: "AdamW" momentum: 0')},  # RMSProp with a correction
        {"b": B + "ema_decay: 0.95"},
    ],
    "other-numbers": [
        images("crop_size: 24 mean_value: 104 scale: 0.01004"),
        images("crop_size: 24 mean_value: [104, 104, 104] std_value: 100"),
    ],
    "odd-range": [seeded("mean_value: 104"), seeded("scale: 0.00390625"), seeded("scale: 0.00390625 std_value: 0.225 mean_value: 104")],
    "channel-order": [
        seeded("channel_order: RGB mean_value: [123.675, 116.28, 103.53] scale: 0.01"),
        {"a": A + 'weights { file: "torchvision.pth" drop: "fc.*" }'},
    ],
    "other-sizes": [
        images("random_resized_crop_param {} crop_size: 24 mean_value: 104 scale: 0.01", "mean_value: 104 scale: 0.01"),
        images("crop_size: 24 mean_value: 104 scale: 0.01", "crop_size: 32 mean_value: 104 scale: 0.01"),  # FixRes
    ],
    "unread-field test_iter": [{"b": B + "test_iter: 5 test_interval: 10"}],
    "compress-alone": [{"b": B + "compress_param { method: TOP_K }"}, {"b": B + "device_batch_size: 100"}],
    "compress-more": [
        {"b": B + "compress_param { method: TOP_K ratio: 0.96 }"},
        {"b": B + "compress_param { method: RANDOM_K ratio: 0.9 }"},
        {"schedule": ELASTIC, "b": B + "compress_param { method: TOP_K ratio: 0.25 }"},
    ],
    "no-memory": [
        {"b": B + "compress_param { method: TOP_K }"},
        {"b": B + "compress_param { method: QSGD }"},  # unbiased
    ],
    "one-replica": [
        {"b": B + "sync_param { method: LOCAL replicas: 2 period: 8 }"},
        {"b": B + "sync_param { method: DILOCO replicas: 1 period: 8 }"},  # Lookahead
    ],
    "period-beyond": [{"b": B + "sync_param { method: LOCAL replicas: 2 period: 50 }"}],
    "staleness-waits": [{"b": B + "sync_param { method: ASYNC replicas: 4 max_staleness: 3 }"}],
    "unsaved-work": [
        {"a": A.replace("100", "70000").replace("200", "140000") + 'clear: "snapshot"'},
        {"a": A.replace("100", "900000").replace("200", "1800000")},
        {"b": B.replace("max_iter: 50", "max_iter: 5")},  # an interval for all stages
    ],
}  # fmt: skip


@pytest.mark.parametrize("id, texts, place", [(id, *case) for id, cases in FIRES.items() for case in cases])
def test_it_fires(id: str, texts: dict[str, str], place: str) -> None:
    assert found(**texts) == [f"{id} {place}"]


@pytest.mark.parametrize("id, texts", [(id, case) for id, cases in PASSES.items() for case in cases])
def test_it_does_not(id: str, texts: dict[str, str]) -> None:
    assert id.split()[0] not in [line.split()[0] for line in found(**texts)]


def test_every_rule_is_tested() -> None:
    assert set(FIRES) == set(RULES) - {"lint-comment", "far-mean"}


def test_images_that_are_here_are_looked_at(tmp_path: Path) -> None:
    """A mean, and sizes of which only some fit; a comment is no finding where they aren't here."""
    white, small = tmp_path / "white", tmp_path / "small"
    for folder, level, side in ((white, 240, 64), (small, 100, 27)):
        (folder / "images" / "a").mkdir(parents=True)
        picture = np.random.default_rng(1).integers(level - 9, level + 9, (side, side, 3), np.uint8)
        cv2.imwrite(str(folder / "images" / "a" / "1.png"), picture)
        done = CliRunner().invoke(main, ["data", "import", str(folder / "images"), str(folder / "lmdb")])
        assert done.exit_code == 0, done.output
    resized = images("random_resized_crop_param {} crop_size: 24 mean_value: 104 scale: 0.01")
    for train, val, expected in (
        (white, white, ["far-mean schedule.prototxt:6:47", "far-mean b.prototxt:5:74", "other-sizes b.prototxt:5:59"]),
        (small, small, []),
        (small, white, ["other-sizes b.prototxt:5:59"]),
    ):
        schedule = SCHEDULE.replace('"train"', f'"{train}/lmdb"').replace('"val"', f'"{val}/lmdb"')
        assert sorted(found(schedule=schedule, **resized)) == sorted(expected)
    silenced = {
        "schedule": "# lint: ignore far-mean, other-sizes\n" + SCHEDULE,
        "b": "# lint: ignore other-sizes\n" + B,
    }
    assert found(**silenced) == []


@pytest.mark.parametrize("id", FIRES)
@pytest.mark.parametrize("where", ["head", "line", "above", "above, among others"])
def test_a_comment_silences_it(id: str, where: str) -> None:
    texts, place = FIRES[id][0]
    path, number, _ = place.split(":")
    name, line = path.removesuffix(".prototxt"), int(number) - 1
    lines = {"schedule": SCHEDULE, "a": A, "b": B, **texts}[name].splitlines()
    comment = f"# lint: ignore {id}: as published"
    if where == "head":
        lines = [comment, *lines]
    elif where == "line" and "#" not in lines[line]:
        lines[line] += "  " + comment
    elif where == "line":
        pytest.skip("a line has one comment")
    else:
        more = ["  # lint: ignore " + id, "  # why"] if "others" in where else [comment]
        lines = ['clear: "display"' if name != "schedule" else "seed: 2", *lines[:line], *more, *lines[line:]]
        if name != "schedule":
            texts = texts | {
                "schedule": texts.get("schedule", SCHEDULE).replace("snapshot: 10", "snapshot: 10 display: 5")
            }
    assert found(**(texts | {name: "\n".join(lines)})) == []


TWICE = {"a": A + "warmup_iter: 10 warmup_start_lr: 0.2", "b": B + "snapshot: 51"}


@pytest.mark.parametrize(
    "a, expected",
    [
        ("# lint: ignore warmup-start\n" + TWICE["a"], ["unsaved-work b.prototxt:5:11"]),
        (
            "# lint: ignore unsaved-work\n" + TWICE["a"],
            ["lint-comment a.prototxt:1:16", "warmup-start a.prototxt:7:34"],
        ),
        ("# lint: ignore warmup-start, lr-jump\n" + TWICE["a"], ["lint-comment a.prototxt:1:30"]),
        (
            "# lint: ignore warmup-strat\n" + TWICE["a"],
            ["lint-comment a.prototxt:1:16", "warmup-start a.prototxt:7:34"],
        ),
        ("# lint: ignore\n" + TWICE["a"], ["lint-comment a.prototxt:1:1", "warmup-start a.prototxt:7:34"]),
        ("#lint:ignore warmup-start\n" + TWICE["a"], []),
        ("## Lint: as usual\n" + TWICE["a"], ["warmup-start a.prototxt:7:34"]),
        ("# lint: off\n" + TWICE["a"], ["lint-comment a.prototxt:1:1", "warmup-start a.prototxt:7:34"]),
        (
            TWICE["a"] + "\n# lint: ignore warmup-start",
            ["warmup-start a.prototxt:6:34", "lint-comment a.prototxt:7:16"],
        ),
        (
            "# lint: ignore lint-comment\n" + TWICE["a"],
            ["lint-comment a.prototxt:1:16", "warmup-start a.prototxt:7:34"],
        ),
    ],
)
def test_comments_that_do_too_little(a: str, expected: list[str]) -> None:
    rest = [line for line in found(a=a, b=TWICE["b"]) if line != "unsaved-work b.prototxt:5:11"]
    assert rest == [line for line in expected if not line.startswith("unsaved")]


def test_a_hash_in_a_string_is_no_comment() -> None:
    text = "name: \"# lint: ignore no-test\"  # one # and 'another'\n\n  # two\nstage { name: 'a#' }#three\n"
    assert [(c.line, c.column, c.text, c.alone, c.head) for c in comments_of("f", text)] == [
        (1, 33, "# one # and 'another'", False, False),
        (3, 3, "# two", True, False),
        (4, 21, "#three", False, False),
    ]
    assert [c.head for c in comments_of("f", "\n# a\n\n# b\nx: 1 # c\n# d")] == [True, True, False, False]


def test_what_is_inherited_is_found_once() -> None:
    assert len(found(schedule=LARGE, a=LARGE_A, b=LARGE_B)) == 1


def test_what_is_set_on_the_command_line_is_found_there() -> None:
    (one,) = lint(read(changes=("b.base_lr=0.3",)))
    assert one.id == "lr-jump" and one.span.path == "--set"


def test_it_is_shown_like_a_mistake() -> None:
    schedule = read(b=B + "\tsnapshot: 51")
    (problem,) = problems(schedule, lint(schedule))
    assert problem.render() == (
        "b.prototxt:5:12: `snapshot` 51 is never due: stage `b` has 50 iterations [unsaved-work]\n"
        "  \tsnapshot: 51\n"
        "  \t          ^^\n"
        "  hint: there is always one at the end of a stage"
    )


def write(folder: Path, **texts: str) -> str:
    for name, text in {"schedule": SCHEDULE, "a": A, "b": B, **texts}.items():
        (folder / f"{name}.prototxt").write_text(text)
    return str(folder)


def test_the_command(tmp_path: Path) -> None:
    clean = CliRunner().invoke(main, ["check", write(tmp_path)])
    assert clean.exit_code == 0 and "no mistakes, no findings" in clean.output
    folder = write(tmp_path, b=B.replace("0.05", "0.2"))
    looks_wrong = CliRunner().invoke(main, ["check", folder])
    assert looks_wrong.exit_code == 0 and "no mistakes, 1 finding, " in looks_wrong.stdout
    strict = CliRunner().invoke(main, ["check", folder, "--strict"])
    assert strict.exit_code == 64 and "1 finding\n  hint: what is meant is silenced by a comment" in strict.stderr
    for shown in (looks_wrong, strict):
        assert f"{folder}/b.prototxt:1:10: the learning rate jumps 0.0505 -> 0.2 (x3.96)" in shown.stderr
    told = CliRunner().invoke(main, ["help", "lint"])
    assert told.exit_code == 0 and all(id in told.output for id in RULES)


@pytest.mark.parametrize("folder", sorted(p.name for p in SOLVERS.iterdir() if (p / "schedule.prototxt").exists()))
def test_what_comes_with_stagerun_is_clean(folder: str) -> None:
    schedule = language.load(SOLVERS / folder)
    assert [p.render() for p in problems(schedule, lint(schedule))] == []


def test_check_notes_what_images_are_not_on_this_machine(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (Path(folder) / "val").mkdir()
    checked = CliRunner().invoke(main, ["check", str(folder)])
    assert checked.exit_code == 0 and "no mistakes" in checked.stdout
    assert checked.stderr.startswith("note: data.train: there is no LMDB at ") and checked.stderr.count("note:") == 1


def test_check_notes_messages_that_replaced_what_they_now_merge_with(tmp_path: Path) -> None:
    folder = write(tmp_path, b=B + "transform_param { mirror: true }")
    said = (
        "note: `b.transform_param`: what isn't written there is inherited now; before, the whole message was replaced"
    )
    assert said in CliRunner().invoke(main, ["check", folder]).stderr
    folder = write(tmp_path, b=B + 'clear: "transform_param.scale" transform_param { mirror: true }')
    assert "before 1.0" not in CliRunner().invoke(main, ["check", folder]).stderr
