"""Situations of public bug reports of other projects, each once: what happened there must not happen here.

Other tests show these:

    gt-pyg#112                            frozen BatchNorm       test_weights_run::test_what_is_frozen_stays_and_what_is_thawed_moves
    Lightning#18727, #20277, mmengine#507 early stop after stops test_early_stop::test_stopped_anywhere_it_comes_to_the_same_decision_and_bits
    timm PR#2756                          plateau after stops    test_plateau::test_stopped_after_every_fourth_update_it_drops_where_it_would_have
    find_unused_parameters                unused layers          test_engine_update::test_workers_equal_one_worker_to_rounding_and_elastic_ones_bit_for_bit
    SimpleTuner PR#2989                   killed in a save       test_store_crash; renamed: test_store_damage::test_a_snapshot_swapped_for_another_is_not_read_in_its_place
    nano-world-model PR#22                1x24 = 6x4, clipped    test_engine_update::test_a_linear_classifier_is_the_same_however_the_batch_is_cut
    spd#741                               stops in evaluations   test_due_once, test_stop::test_runs_that_break_off_iterations_come_to_the_same_bits
    UniRL PR#223, GCVit PR#75             policies and warm-ups  test_schedule_shapes
    Megatron PR#6920                      an edited network      test_own_network::test_an_edit_of_its_files_makes_a_stage_stale
    transformers#28544                    averages after stops   test_due_once
    verl#7401, KempnerForge#57, swa#22    pairs, smoothing       test_reference::test_three_workers_killed_then_two_then_one
    kornia#4712                           images after kills     test_reference::test_three_workers_killed_then_two_then_one
    rf-detr#1507                          evaluated once         test_engine_loop::test_each_image_counts_once_whatever_the_workers_and_the_last_batch
    DeepSpeed PR#8142                     a long warm-up         test_schedule_shapes::test_a_warm_up_as_long_as_the_stage_is_a_line
"""

import os
import shutil
from itertools import cycle
from pathlib import Path

import pytest
from facade import Iterated
from nan_help import lives, make_schedule
from test_run_trees import ids

pytestmark = pytest.mark.long


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_from_a_newest_snapshot_that_is_harmed_in_any_file_it_goes_back_to_the_one_before(few, tmp_path):
    """speculators PR#739. That every harm of a file is found, test_store_damage shows."""
    folder = make_schedule(tmp_path / "s", few, "snapshot: 4")
    lives(folder, tmp_path / "whole")
    lives(folder, tmp_path / "killed", kill_after=10)
    files = sorted(file.name for file in (tmp_path / "killed/snapshots/main-00000008-a0001").iterdir())
    assert len(files) >= 5
    for name, harm in zip(files, cycle((lambda file: os.truncate(file, 9), flipped, Path.unlink)), strict=False):
        out = tmp_path / name
        shutil.copytree(tmp_path / "killed", out)
        harm(out / "snapshots/main-00000008-a0001" / name)
        again = [event.iter for event in lives(folder, out) if isinstance(event, Iterated)]
        assert again == list(range(5, 13)), name
        assert ids(out)["main@12"] == ids(tmp_path / "whole")["main@12"]
