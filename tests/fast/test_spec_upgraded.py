"""Identities of snapshots that another version made: what that did not know has its default."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from facade import completed, recipe
from test_spec_resolve import SCHEDULE, A, B

from stagerun.language import load, read

FOLDERS = sorted(p.parent for p in (Path(__file__).parents[2] / "solvers").glob("*/schedule.prototxt"))
# Their defaults follow from other fields.
DERIVED = {
    "solver.random_seed", "model.batch_norm_param.moving_average_fraction", "model.batch_norm_param.eps",
    *(f"solver.compress_param.{name}" for name in ("memory", "ratio", "threshold", "qstates", "rank")),
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_identity_of_this_version_is_complete_and_a_default_that_is_left_out_comes_back(folder):
    for stage in (stages := load(folder).stages):
        whole = completed(stage.identity)
        assert stage.identity.items() <= whole.items()
        # A field may count for some stages only.
        assert whole.keys() - stage.identity.keys() <= stage.origins.keys()
    stage = stages[-1]
    whole = completed(stage.identity)
    defaults = {k for k in stage.identity.keys() - DERIVED if stage.origins[k].layer == "default"}
    assert len(defaults) > 10
    assert completed({key: value for key, value in stage.identity.items() if key not in defaults}) == whole
    for key in defaults:
        assert completed({k: v for k, v in stage.identity.items() if k != key}) == whole, key


def test_a_message_that_may_be_absent_is_not_there_with_its_defaults():
    def identity(transform: str) -> Mapping[str, str]:
        text = SCHEDULE.replace("transform_param {", "transform_param { " + transform)
        return read({"schedule.prototxt": text, "a.prototxt": A, "b.prototxt": B}, "/s").stages[0].identity

    key = "solver.transform_param.random_resized_crop_param"
    without, empty = identity(""), identity("random_resized_crop_param {}")
    assert without[key] == "none" and key not in empty
    inside = {k for k in empty if k.startswith(f"{key}.")}
    assert inside and completed(empty) != completed(without)
    # A field of it that is younger than the snapshot has its default, where the message is there.
    for name in inside:
        assert completed({k: v for k, v in empty.items() if k != name}) == completed(empty)
    assert completed({k: v for k, v in without.items() if k != key}) == completed(without)


def test_what_counts_no_more_is_left_out_and_what_is_not_known_stays():
    found = completed({"name": '"old"', "solver.display": "5", recipe.FROM_ITER: "7", "solver.from_the_future": "1"})
    assert "name" not in found and "solver.display" not in found
    assert found[recipe.FROM_ITER] == "7" and found["solver.from_the_future"] == "1"
    assert found["solver.momentum"] == completed({})["solver.momentum"]
