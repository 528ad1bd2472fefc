"""Labels that a net of Caffe's ignores: two workers train and score what the formula says, as one does."""

import json
from pathlib import Path

import ignoring
import numpy as np
import pytest
import small
from facade import net
from safetensors.numpy import load_file
from test_ignored_labels import scores, trained

VALID = net.Normalization.VALID


def test_on_two_workers(tmp_path: Path) -> None:
    schedule, out = ignoring.written(tmp_path / "s"), tmp_path / "out"
    done = small.run(schedule, out, "--set", "determinism=ELASTIC", nproc=2)
    assert done.returncode == 0, done.stderr
    (snapshot,) = (out / "snapshots").glob("main-*")
    found, (weight, bias) = load_file(snapshot / "model.safetensors"), trained(schedule, VALID)
    np.testing.assert_allclose(found["ip.weight"], weight, rtol=0, atol=1e-13)
    np.testing.assert_allclose(found["ip.bias"], bias, rtol=0, atol=1e-13)
    result = json.loads((out / "results" / f"{snapshot.name}.json").read_text())
    top1, loss = scores(schedule, weight, bias, VALID)
    assert result["top1"] == top1 and result["test_loss"] == pytest.approx(loss, abs=1e-12)
