"""Runs with all that is drawn about images, and about which come: the same bits from the middle on, by other workers and threads."""

import shutil

import numpy as np
import processes
import pytest
import small
from contract import stagerun
from facade import write_lmdb
from made_images import raw
from test_run_trees import go

from stagerun.store import LocalDisk, inventory

SCHEDULE = """
name: "drawn"
determinism: ELASTIC
model { name: "resnet_small" num_classes: 4 }
data { train { source: "data" images: 40 } val { source: "data" images: 40 } }
solver {
  batch_size: 12 device_batch_size: 4 momentum: 0.9
  base_lr: 0.02 lr_policy: "fixed" max_iter: 6 snapshot: 3 test_batch_size: 20
  mixup_alpha: 0.4 cutmix_alpha: 1 label_smoothing: 0.1 sampling: BALANCED class_weight: [1, 0.5, 2, 3]
  transform_param {
    crop_size: 16 mirror: true channel_order: RGB mean_value: [124, 117, 104] std_value: [58, 57, 57] cutout_size: 5
    random_resized_crop_param { } rand_augment_param { num_ops: 2 } python: "aug.py:augment"
  }
}
stage { name: "a" solver_param { } }
stage { name: "b" solver_param { sampling: UNIFORM } }
"""
AUGMENT = """import numpy as np

from turned import turn


def augment(image, rng):
    noise = rng.integers(-20, 21, image.shape)
    return turn(np.clip(image + noise, 0, 255).astype(np.uint8), rng.integers(4))
"""
TURNED = "import numpy as np\n\n\ndef turn(image, times):\n    return np.rot90(image, times)\n"


@pytest.fixture
def schedule(tmp_path):
    """With colours, mixed images, balanced classes, class weights and a function of the user's."""
    rng, folder = np.random.default_rng(1), tmp_path / "schedule"
    folder.mkdir()
    labels = np.repeat(np.arange(4), (25, 10, 4, 1)).tolist()
    images = [rng.integers(0, 256, (20 + i % 3, 24, 3), dtype=np.uint8) for i in range(40)]
    write_lmdb(str(folder / "data"), list(map(raw, images, labels)))
    assert stagerun(["data", "verify", "--index", "data"], folder).exit_code == 0
    for name, text in (("schedule.prototxt", SCHEDULE), ("aug.py", AUGMENT), ("turned.py", TURNED)):
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("workers, threads", [(2, 3), (3, 1)])
def test_a_resume_by_other_workers_and_threads_trains_the_same_bits(tmp_path, schedule, workers, threads):
    """Without its last snapshots a run goes on from the one before, in the middle of stage `a`."""
    alone, out = tmp_path / "alone", tmp_path / "out"
    go(schedule, alone)
    shutil.copytree(alone, out)
    for snapshot in [*out.glob("snapshots/b-*"), *out.glob("snapshots/a-00000006-*")]:
        shutil.rmtree(snapshot)
    done = small.run(schedule, out, "--set", f"data.loader_threads={threads}", nproc=workers, code=0)
    assert "resume is BIT-EXACT" in done.stdout
    made_by = [ref.environment["colour library"] for ref in inventory(LocalDisk(), out).snapshots]
    assert all("torchvision" in libraries and "pillow" in libraries for libraries in made_by)
    assert processes.ends(out) == processes.ends(alone)
