"""Labels that a net of Caffe's ignores: the same weights and scores by one worker and two."""

import json
from pathlib import Path

import ignoring
import small


def test_one_worker_and_two(tmp_path: Path) -> None:
    schedule = ignoring.written(tmp_path / "s", more="momentum: 0.9")
    text = (schedule / "schedule.prototxt").read_text()
    (schedule / "schedule.prototxt").write_text("determinism: ELASTIC\n" + text.replace("momentum: 0 ", ""))
    found = []
    for nproc in (1, 2):
        out = tmp_path / f"out{nproc}"
        done = small.run(schedule, out, nproc=nproc)
        assert done.returncode == 0, done.stderr
        (snapshot,) = (out / "snapshots").glob("main-*")
        result = json.loads((out / "results" / f"{snapshot.name}.json").read_text())
        found.append(((snapshot / "model.safetensors").read_bytes(), result["top1"], result["test_loss"]))
    assert found[0] == found[1]
