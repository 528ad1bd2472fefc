"""Situations of public bug reports of other projects, each once: what happened there must not happen here.

Other tests show these:

    gt-pyg#112                            frozen BatchNorm       test_weights_files::test_a_frozen_norm_is_in_evaluation_mode_and_in_no_vector
    Lightning#18727, #20277, mmengine#507 early stop after stops test_early_stop::test_stopped_anywhere_it_comes_to_the_same_decision_and_bits
    timm PR#2756                          plateau after stops    test_plateau::test_stopped_after_every_fourth_update_it_drops_where_it_would_have
    find_unused_parameters                unused layers          test_engine_update::test_workers_equal_one_worker_to_rounding_and_elastic_ones_bit_for_bit
    SimpleTuner PR#2989                   killed in a save       test_store_crash; renamed: test_store_damage::test_a_snapshot_swapped_for_another_is_not_read_in_its_place
    nano-world-model PR#22                1x24 = 6x4, clipped    test_engine_update::test_a_linear_classifier_is_the_closed_form_however_the_batch_is_cut
    spd#741                               stops in evaluations   test_due_once, test_stop::test_runs_that_break_off_iterations_come_to_the_same_bits
    UniRL PR#223, GCVit PR#75             policies and warm-ups  test_schedule_shapes
    Megatron PR#6920                      an edited network      test_own_network::test_an_edit_of_its_files_makes_a_stage_stale
    transformers#28544                    averages after stops   test_due_once
"""

import os
import shutil
from itertools import cycle
from pathlib import Path

import pytest
from facade import Iterated, RunFinished, Tested
from nan_help import lives, make_data, make_schedule
from test_run_trees import ids
from test_schedule_shapes import rates, solver

from stagerun.schedule import POLICIES, own_fields

pytestmark = pytest.mark.long

# 7.5 iterations are an epoch: one ends within an iteration, the next at the end of one.
IMAGES, LENGTH = 60, 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    make_data(folder / "train", images=IMAGES)
    make_data(folder / "val", images=22)
    return folder


def made(folder: Path, data: Path, main: str, images: str = "") -> Path:
    """A stage whose bits don't hang on the number of workers; `images`: what is done to images besides a crop."""
    make_schedule(
        folder, data / "train", images=IMAGES, shared="determinism: ELASTIC", main=f"max_iter: {LENGTH} {main}"
    )
    file = folder / "schedule.prototxt"
    text = file.read_text().replace("scale: 1e18", images)
    file.write_text(text.replace("shuffle: false", f'val {{ source: "{data}/val" images: 22 }}'))
    return folder


KILLED = {
    "averages, pairs of images, smoothing, frozen layers (verl#7401, KempnerForge#57, swa#22)": (
        'snapshot: 3 ema_decay: 0.9 ema_interval: 2 mixup_alpha: 0.4 label_smoothing: 0.1 freeze: "conv1.*" freeze: "bn1.*"',
        "",
    ),
    "images (kornia#4712)": ("snapshot: 4", "pad: 2 random_resized_crop_param { } cutout_size: 4"),
    "a plateau (timm PR#2756)": ('snapshot: 5 lr_policy: "plateau" gamma: 0.5 plateau_winsize: [2, 2]', ""),
    "an early stop with an average (transformers#28544)": (
        "snapshot: 3 test_interval: 2 ema_decay: 0.9 early_stop { metric: LOSS patience_iter: 6 min_delta: 10 }",
        "",
    ),
}


@pytest.mark.parametrize("what", KILLED)
def test_killed_where_epochs_end_and_gone_on_by_other_workers_it_has_the_same_bits(what, data, tmp_path):
    folder = made(tmp_path / "s", data, *KILLED[what])
    assert isinstance(lives(folder, tmp_path / "whole")[-1], RunFinished)
    for workers in (2, 3):
        life = lives(folder, tmp_path / "out", workers, kill_after=8)
        assert sum(isinstance(event, Iterated) for event in life) == 8 or isinstance(life[-1], RunFinished)
    assert isinstance(lives(folder, tmp_path / "out")[-1], RunFinished)
    mine, there = ids(tmp_path / "out"), ids(tmp_path / "whole")
    end = max(there, key=lambda place: int(place.split("@")[1]))
    assert mine[end] == there[end]


def test_every_image_is_evaluated_once_by_any_number_of_workers(data, tmp_path):
    """22 images in batches of 5 (rf-detr#1507)."""
    folder = made(tmp_path / "s", data, "test_batch_size: 5")
    found = set()
    for workers in (1, 2, 3):
        events = lives(folder, tmp_path / f"out{workers}", workers)
        found |= {(e.images, e.top1, round(e.loss, 12)) for e in events if isinstance(e, Tested)}
    assert len(found) == 1 and found.pop()[0] == 22


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_from_a_newest_snapshot_that_is_harmed_in_any_file_it_goes_back_to_the_one_before(data, tmp_path):
    """speculators PR#739. That every harm of a file is found, test_store_damage shows."""
    folder = made(tmp_path / "s", data, "snapshot: 4")
    lives(folder, tmp_path / "whole")
    lives(folder, tmp_path / "killed", kill_after=14)
    files = sorted(file.name for file in (tmp_path / "killed/snapshots/main-00000012-a0001").iterdir())
    assert len(files) >= 5
    for name, harm in zip(files, cycle((lambda file: os.truncate(file, 9), flipped, Path.unlink)), strict=False):
        out = tmp_path / name
        shutil.copytree(tmp_path / "killed", out)
        harm(out / "snapshots/main-00000012-a0001" / name)
        again = [event.iter for event in lives(folder, out) if isinstance(event, Iterated)]
        assert again == list(range(9, LENGTH + 1)), name
        assert ids(out)[f"main@{LENGTH}"] == ids(tmp_path / "whole")[f"main@{LENGTH}"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_warm_up_as_long_as_the_stage_is_a_line(policy):
    """DeepSpeed PR#8142: no rate is a number by chance where nothing is left to decay."""
    own = {"gamma": "gamma: 0.5", "power": "power: 2", "stepsize": "stepsize: 3", "stepvalue": "stepvalue: 9"}
    own |= {"plateau_winsize": "plateau_winsize: 5", "knot": "knot { iter: 0 factor: 1 } knot { iter: 10 factor: 0 }"}
    own |= {"lr_iter": "lr_iter: 20"}
    fields = " ".join(text for name, text in own.items() if name in own_fields(policy))
    settings = solver(f'base_lr: 0.4 lr_policy: "{policy}" max_iter: 10 warmup_iter: 10 warmup_start_lr: 0.1 {fields}')
    assert rates(settings) == pytest.approx([0.1 + 0.03 * i for i in range(10)], rel=1e-12)
