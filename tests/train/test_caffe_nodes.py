"""Several nodes of Caffe, imported and trained, against the numbers of a float64 restatement (golden/caffe/README.md)."""

import json
import shutil
from pathlib import Path
from typing import Any

import contract
import numpy as np
import pytest
from caffe_nets import GOLDEN, single, write_fashion
from facade import Iterated
from safetensors.numpy import load_file

import stagerun
from stagerun.language import load

RESTATED = json.loads((GOLDEN / "nodes.json").read_text())
BATCH, RECORDS = 4, 96
SOLVER = """net: "nets/{net}.prototxt" base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: {length} momentum: 0.9 weight_decay: 0.0005
warmup_iter: 3 warmup_start_lr: 0.02 snapshot: 4 snapshot_prefix: "x/{prefix}" clip_gradients: 0.001 {more}
"""


def assert_restated(key: str, losses: list[float], tensors: dict[str, np.ndarray]) -> None:
    right, ends = RESTATED[key]
    np.testing.assert_allclose(losses, right, rtol=1e-9)
    assert ends.keys() <= tensors.keys()
    for name, (total, *some) in ends.items():
        found = tensors[name]
        most = 1e-9 * max(np.abs(found).max(), 1e-3)
        np.testing.assert_allclose(found.flat[:: max(1, found.size // 9)], some, rtol=0, atol=most, err_msg=name)
        assert found.sum() == pytest.approx(total, abs=most * found.size), name


def caffes(folder: Path, net: str, solvers: dict[str, str], readme: str) -> None:
    """A folder of Caffe's."""
    (folder / "nets").mkdir(parents=True)
    (folder / "data").mkdir()
    text = (GOLDEN / f"{net}.prototxt").read_text().replace("batch_size: 64", f"batch_size: {BATCH}")
    (folder / "nets" / f"{net}.prototxt").write_text(text)
    shutil.copy(GOLDEN / f"init_{net}_iter_0.caffemodel", folder / "first.caffemodel")
    write_fashion(folder / "data", RECORDS, RECORDS)
    (folder / "README").write_text(readme)
    for name, solver in solvers.items():
        (folder / f"{name}.prototxt").write_text(solver)


def trained(folder: Path, *options: str) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Losses and end of each stage, imported from the folder as it is. Momentum and decay are float32, as in Caffe."""
    out = folder / "made"
    done = contract.stagerun(["import", "caffe", ".", "--out", out, *options], folder)
    assert done.exit_code == 0, done.output
    stages = [stage.name for stage in load(out).stages]
    changes = ("precision=FP64", "channels_last=false", "snapshot=0", "test_interval=0")
    changes += (f"momentum={single(0.9)!r}", f"weight_decay={single(0.0005)!r}")
    sets = [f"{stage}.{change}" for stage in stages for change in changes]
    losses: dict[str, list[float]] = {stage: [] for stage in stages}
    for event in stagerun.run(out, folder / "out", overrides=sets, threads=1):
        if isinstance(event, Iterated):
            losses[event.stage].append(event.loss)
    last = {
        s: max((folder / "out" / "snapshots").glob(f"{s}-*"), key=lambda path: path.stat().st_mtime) for s in stages
    }
    return losses, {stage: load_file(path / "model.safetensors") for stage, path in last.items()}


@pytest.mark.parametrize(
    ("ranks", "overlap", "more"),
    [
        (2, False, ""),
        (4, False, "iter_size: 2"),
        (2, True, "test_interval: 3 test_iter: 1"),
        (4, True, "iter_size: 2"),
    ],
)
def test_several_nodes(ranks, overlap, more, tmp_path):
    solver = SOLVER.format(net="bnnet", prefix="a", length=8, more=more)
    readme = f"mpirun -n {ranks} caffe train --solver solver.prototxt --weights first.caffemodel\n"
    caffes(tmp_path, "bnnet", {"solver": solver}, readme)
    losses, ends = trained(tmp_path, *(["--overlap"] if overlap else []))
    assert_restated(f"{ranks} {overlap} {more.partition(':')[0]}".strip(), losses["main"], ends["main"])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stage_from_a_snapshot_in_mid_training(overlap, tmp_path):
    """Which lacks the last update where gradients wait."""
    texts = {name: SOLVER.format(net="lenet", prefix=name, length=8, more="") for name in ("solver", "solver_b")}
    readme = "mpirun -np 2 caffe train --solver solver.prototxt --weights first.caffemodel\n"
    readme += "mpirun -np 2 caffe train --solver solver_b.prototxt --weights x/solver_iter_4.caffemodel\n"
    caffes(tmp_path, "lenet", texts, readme)
    losses, ends = trained(tmp_path, *(["--overlap"] if overlap else []))
    for stage in ("main", "b"):
        assert_restated(f"{stage} {overlap}", losses[stage], ends[stage])
