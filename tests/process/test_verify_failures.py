"""`stagerun verify` where iterations failed (`on_nan`): an honest run is proven before the failure and after it."""

import json
from pathlib import Path

import pytest
import small
from nan_help import make_data, make_schedule

POISON = 50  # met in iteration 6; with the 24 images that are then left out not again before iteration 11


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "lmdb", POISON)


def verdict(folder: Path, out: Path, *words: object) -> tuple[int, str, object, list[str]]:
    done = small.stagerun("verify", folder, "--out", out, "--json", *words)
    found = json.loads(done.stdout)
    return done.returncode, found["verdict"], found["trained"], found["wrong"]


def test_a_run_that_went_back_and_left_images_out_is_proven(tmp_path, data):
    audit = "max_iter: 10 audit_param { proof_iter: 2 }"
    folder, out = make_schedule(tmp_path / "s", data, "on_nan: ROLLBACK snapshot: 4", main=audit), tmp_path / "out"
    done = small.run(folder, out)
    assert done.returncode == 0 and "at iteration 6, LR 0.05: back to 4" in done.stdout
    assert verdict(folder, out) == (0, "BIT-EXACT", 3, []), "from 0 to 4, and from 8 on"
    lines = (out / "log.jsonl").read_text().splitlines(keepends=True)
    (out / "log.jsonl").write_text("".join(line for line in lines if '"event": "NotFinite"' not in line))
    code, said, _, wrong = verdict(folder, out, "--proofs", 0)
    assert (code, said) == (80, "DIFFERS"), "images can't be left out without a failure"
    assert wrong[0] == "snapshot main-00000008-a0001 has gone back 1 time (`on_nan`), and the log says 0"


def test_a_run_that_skipped_iterations_is_proven_over_a_stage_without_proofs(tmp_path, data):
    proven = "audit_param { proof_iter: 5 }"
    stages = {"first": f"max_iter: 10 {proven}", "between": "max_iter: 1", "last": f"max_iter: 5 {proven}"}
    folder, out = make_schedule(tmp_path / "s", data, "on_nan: SKIP snapshot: 5", **stages), tmp_path / "out"
    done = small.run(folder, out)
    assert done.returncode == 0 and "at iteration 6, LR 0.05: skipped" in done.stdout
    assert verdict(folder, out) == (0, "BIT-EXACT", 3, []), "to 5, over the failure to 10, and `last`"
