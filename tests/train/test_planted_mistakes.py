"""What people who come from other tools write wrongly, one mistake in a schedule that is right otherwise: `check` finds each, and says what to
write instead."""

import contract
import cv2
import numpy as np
import pytest

SCHEDULE = """name: "s"
model { name: "resnet18" num_classes: 2 }
data { train { source: "train" } val { source: "val" } }
solver {
  batch_size: 4 device_batch_size: 4 momentum: 0.9 weight_decay: 1e-4 snapshot: 5
  base_lr: 0.01 lr_policy: "cosine" max_iter: 20 warmup_iter: 5 decay_from: WARMUP_END
  transform_param { crop_size: 32 channel_order: RGB NUMBERS }
  test_transform_param { crop_size: 32 channel_order: RGB NUMBERS }
}
stage { name: "trunk" solver_param {} }
""".replace("NUMBERS", "mean_value: [123.675, 116.28, 103.53] std_value: [58.395, 57.12, 57.375]")
MEAN, STD, WRITTEN = "[123.675, 116.28, 103.53]", "[58.395, 57.12, 57.375]", "[0.485, 0.456, 0.406]"
WEIGHTS = 'weight_decay: 1e-4 weights { file: "%s" drop: "fc.*" }'
ADAMW = 'type: "AdamW" momentum: 0.9 momentum2: 0.999 weight_decay: 0.05'
IMAGENET = "channel_order: RGB  mean_value: [123.675, 116.28, 103.53]  std_value: [58.395, 57.12, 57.375]"

# name: what is replaced by what, and again; the finding ('' is a mistake) and what it says
PLANTED = {
    "mean of 0 to 1": ([(MEAN, WRITTEN)], "odd-range", f"mean_value: {MEAN}"),
    "mean and deviation of 0 to 1": ([(MEAN, WRITTEN), (STD, "[0.229, 0.224, 0.225]")], "odd-range", f"std_value: {STD}"),
    "deviation of 0 to 1": ([(STD, "[0.229, 0.224, 0.225]")], "odd-range", f"std_value: {STD}"),
    "no normalisation": ([(f"mean_value: {MEAN} std_value: {STD}", "")], "odd-range", "mean_value: [128, 128.3, 128.8]"),
    "mean of other images": ([(MEAN, "10")], "far-mean", "mean_value: [128, 128.3, 128.8]"),
    "deviation of other images": ([(STD, "5")], "far-mean", "std_value: [7"),
    "an evaluation without it": ([(f"mean_value: {MEAN} std_value: {STD} }}\n}}", "}\n}")], "other-numbers", "mean_value"),
    "an evaluation in the other order": ([("RGB mean_value: [123.675, 116.28, 103.53] std_value: [58.395, 57.12, 57.375] }\n}",
                                           "BGR mean_value: [123.675, 116.28, 103.53] std_value: [58.395, 57.12, 57.375] }\n}")],
                                         "other-numbers", "channel_order"),
    "ImageNet's mean in the other order": ([("channel_order: RGB", "")], "channel-order", "channel_order: RGB"),
    "torchvision's weights get B, G, R": (
        [("channel_order: RGB", ""), (MEAN, "[103.53, 116.28, 123.675]"), ("weight_decay: 1e-4", WEIGHTS % "torchvision/resnet18")],
        "channel-order", IMAGENET,
    ),
    "timm's weights get B, G, R": (
        [("channel_order: RGB", ""), (MEAN, "[103.53, 116.28, 123.675]"), ("weight_decay: 1e-4", WEIGHTS % "timm/resnet18.a1_in1k")],
        "channel-order", IMAGENET,
    ),
    "timm's weights get another mean": (
        [("weight_decay: 1e-4", WEIGHTS % "timm/vit_base_patch16_224.augreg_in21k")],
        "published-numbers", "mean_value: [127.5, 127.5, 127.5]",
    ),
    "torchvision's weights get another deviation": (
        [(STD, "[64, 64, 64]"), ("weight_decay: 1e-4", WEIGHTS % "torchvision/resnet18")], "published-numbers", IMAGENET,
    ),
    "AdamW without momentum": (
        [("momentum: 0.9 weight_decay: 1e-4", 'type: "AdamW" weight_decay: 0.05')], "doubtful-value", "momentum: 0.9  momentum2: 0.999",
    ),
    "LAMB without momentum": (
        [("momentum: 0.9 weight_decay: 1e-4", 'type: "LAMB" weight_decay: 0.05')], "doubtful-value", "momentum: 0.9  momentum2: 0.999",
    ),
    "SGD without momentum": ([("momentum: 0.9", "")], "doubtful-value", "momentum: 0.9"),
    "AdamW with SGD's decay": (
        [("momentum: 0.9 weight_decay: 1e-4", ADAMW.replace("0.05", "1e-4"))], "doubtful-value", "weight_decay: 0.05",
    ),
    "AdamW with SGD's rate": (
        [("momentum: 0.9 weight_decay: 1e-4", ADAMW), ("base_lr: 0.01", "base_lr: 0.1")], "doubtful-value", "base_lr: 0.001",
    ),
    "a warm-up that cosine cuts": ([("decay_from: WARMUP_END", "")], "warmup-cut", "decay_from: WARMUP_END"),
    "a warm-up that poly cuts": (
        [("decay_from: WARMUP_END", ""), ("cosine", "poly"), ("max_iter: 20", "power: 2 max_iter: 20")],
        "lr-joint", "decay_from: WARMUP_END",
    ),
    "a warm-up of one update": ([("warmup_iter: 5", "warmup_iter: 1")], "lr-jump", "longer"),
    "images of training in the evaluation": ([('val { source: "val" }', 'val { source: "train" }')], "same-images", "train"),
    "some images of training in the evaluation": ([('val { source: "val" }', 'val { source: "part" }')], "same-images", "1 of 2"),
    "other classes in the evaluation": ([('val { source: "val" }', 'val { source: "other" }')], "", "label 1 is `b` in"),
    "more classes than outputs": ([("num_classes: 2", "num_classes: 1")], "", "num_classes: 2"),
    "labels that no class folder named": ([('"train" }', '"listed" }'), ('"val"', '"listed_val"')], "", "label 7"),
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder, draw = tmp_path_factory.mktemp("planted"), np.random.default_rng(1)
    sets = {"train": "aabb", "val": "ab", "other": "ac"}
    for name, classes in sets.items():
        for n, c in enumerate(classes):
            (folder / "pictures" / name / c).mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(folder / "pictures" / name / c / f"{n}.png"), draw.integers(0, 256, (40, 40, 3), np.uint8))
    for c, picture in (("a", "train/a/0"), ("b", "val/b/1")):
        (folder / "pictures" / "part" / c).mkdir(parents=True)
        (folder / "pictures" / "part" / c / "0.png").write_bytes((folder / "pictures" / f"{picture}.png").read_bytes())
    for name in (*sets, "part"):
        assert contract.stagerun(["data", "import", f"pictures/{name}", name], folder).exit_code == 0
    for name, of in (("listed", "train"), ("listed_val", "val")):
        files = sorted((folder / "pictures" / of).rglob("*.png"))
        (folder / f"{name}.txt").write_text(
            "".join(f"{f.relative_to(folder / 'pictures')} {7 * n}\n" for n, f in enumerate(files))
        )
        done = contract.stagerun(["data", "import", f"{name}.txt", name, "--root", "pictures"], folder)
        assert done.exit_code == 0, done.output
    return folder


def checked(images, *changes):
    text = SCHEDULE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (images / "schedule.prototxt").write_text(text)
    return contract.stagerun(["check", "."], images)


def test_nothing_is_found_where_nothing_is(images):
    done = checked(images)
    assert done.exit_code == 0 and "warning:" not in done.output and "note:" not in done.output, done.output


@pytest.mark.parametrize("planted", PLANTED)
def test_it_is_found(planted, images):
    changes, id, said = PLANTED[planted]
    done = checked(images, *changes)
    shown = [part for part in done.output.split("\n\n") if (f"[{id}]" in part if id else "hint:" in part)]
    assert any(said in part for part in shown), done.output
    assert done.exit_code == (0 if id else 64)
