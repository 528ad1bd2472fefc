"""`bench compression` with real workers: stopped, and gone on with."""

import json

import pytest
import small
import tiny


@pytest.mark.slow
def test_a_bench_goes_on_where_it_was(tmp_path):
    tiny.make_data(tmp_path / "data")
    schedule = small.make_schedule(
        tmp_path / "s", tmp_path / "data", init='base_lr: 0.1 lr_policy: "fixed" max_iter: 4'
    )
    words = (
        "bench", "compression", schedule, "--stage", "init", "--workers", 2, "--threads", 1, "--out", tmp_path / "out",
        "--methods", "SIGN",
    )  # fmt: skip
    first = small.stagerun(*words, "--seeds", 1, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "dense" in first.stdout and "RESIDUAL" in first.stdout
    assert "<svg" in (tmp_path / "out/compression.svg").read_text()
    logs = {path: path.read_bytes() for path in (tmp_path / "out").glob("*/seed1/log.jsonl")}
    assert len(logs) == 2

    again = small.stagerun(*words, "--seeds", 2, "--json", timeout=300)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found == json.loads((tmp_path / "out/compression.json").read_text())
    assert [(run["method"], run["seed"]) for run in found["runs"]] == [
        ("dense", 1),
        ("dense", 2),
        ("SIGN", 1),
        ("SIGN", 2),
    ]
    dense, sign = found["rows"]
    assert dense["share"] == 1 and 0 < sign["share"] < 0.2
    assert all(path.read_bytes() == log for path, log in logs.items()), "what is done is not run again"
