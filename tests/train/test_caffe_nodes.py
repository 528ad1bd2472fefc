"""Several nodes of Caffe, imported and trained, against a float64 restatement that itself agrees with real Caffe in one process."""

import shutil
from pathlib import Path
from typing import Any

import contract
import numpy as np
import pytest
import torch
from caffe_nets import GOLDEN, expected, single, trace, write_fashion
from caffe_restated import Restated, first_blobs, restated
from facade import Iterated, caffe_pb2
from google.protobuf import text_format
from safetensors.numpy import load_file

import stagerun
from stagerun.language import load

DATA = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
BATCH, RECORDS = 4, 96
SOLVER = """net: "nets/{net}.prototxt" base_lr: 0.1 lr_policy: "poly" power: 2 max_iter: {length} momentum: 0.9 weight_decay: 0.0005
warmup_iter: 3 warmup_start_lr: 0.02 snapshot: 4 snapshot_prefix: "x/{prefix}" clip_gradients: 0.001 {more}
"""


def rate(solver: str, i: int) -> float:
    """LR(i) of these solvers, in double."""
    s = text_format.Parse(solver, caffe_pb2.SolverParameter())
    base, start = round(s.base_lr, 6), round(s.warmup_start_lr, 6)
    if i < s.warmup_iter:
        return (i * base + (s.warmup_iter - i) * start) / s.warmup_iter
    return base * (1 - i / s.max_iter) ** s.power


@pytest.mark.parametrize("name", ["bnnet_m09_A", "lenet_m09_A"])
def test_the_restatement_is_real_caffe(name: str) -> None:
    net = name.partition("_")[0]
    solver = (GOLDEN / name / "solver.prototxt").read_text()
    lrs, losses, _ = trace(name)
    images = DATA["images"][:9600].reshape(-1, 1, 28, 28)
    made = restated(
        (GOLDEN / f"{net}.prototxt").read_text(), solver, first_blobs(GOLDEN / f"init_{net}_iter_0.caffemodel"),
        images, DATA["labels"], lambda i: lrs[i],
    )  # fmt: skip
    np.testing.assert_allclose(made.losses, losses, rtol=1e-9)
    assert_same(made.snapshots[150], expected(GOLDEN / name / "end.caffemodel"))


def assert_same(found: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for tensor, value in right.items():
        most = 1e-9 * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found[tensor], value, rtol=0, atol=most, err_msg=tensor)


def caffes(
    folder: Path, net: str, ranks: int, overlap: bool, solvers: dict[str, str], readme: str
) -> dict[str, Restated]:
    """A folder of Caffe's, and what the restatement makes of its solvers: the second from the first one's fourth snapshot. A device
    batch of stagerun's is records in a row and Caffe's every `ranks`-th, so the restatement reads them dealt."""
    (folder / "nets").mkdir(parents=True)
    (folder / "data").mkdir()
    text = (GOLDEN / f"{net}.prototxt").read_text().replace("batch_size: 64", f"batch_size: {BATCH}")
    (folder / "nets" / f"{net}.prototxt").write_text(text)
    shutil.copy(GOLDEN / f"init_{net}_iter_0.caffemodel", folder / "first.caffemodel")
    images, labels = DATA["images"][:RECORDS].reshape(-1, 1, 28, 28), DATA["labels"][:RECORDS]
    write_fashion(folder / "data", RECORDS, RECORDS)
    (folder / "README").write_text(readme)
    dealt = np.arange(RECORDS).reshape(-1, ranks, BATCH).transpose(0, 2, 1).reshape(-1)
    made: dict[str, Restated] = {}
    start = first_blobs(folder / "first.caffemodel")
    for name, solver in solvers.items():
        (folder / f"{name}.prototxt").write_text(solver)
        made[name] = restated(
            text, solver, start, images[dealt], labels[dealt], lambda i, s=solver: rate(s, i), ranks=ranks, overlap=overlap
        )  # fmt: skip
        after = made[name].snapshots.get(4, {})
        start = {
            n: [torch.tensor(after[f"{n}.{part}"]) for part in ("weight", "bias") if f"{n}.{part}" in after] or blobs
            for n, blobs in start.items()
        }
    return made


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
    ("net", "ranks", "overlap", "more"),
    [
        ("bnnet", 2, False, ""),
        ("bnnet", 4, False, "iter_size: 2"),
        ("bnnet", 2, True, "test_interval: 3 test_iter: 1"),
        ("bnnet", 4, True, "iter_size: 2"),
    ],
)
def test_several_nodes(net: str, ranks: int, overlap: bool, more: str, tmp_path: Path) -> None:
    solver = SOLVER.format(net=net, prefix="a", length=8, more=more)
    readme = f"mpirun -n {ranks} caffe train --solver solver.prototxt --weights first.caffemodel\n"
    right = caffes(tmp_path, net, ranks, overlap, {"solver": solver}, readme)["solver"]
    losses, ends = trained(tmp_path, *(["--overlap"] if overlap else []))
    np.testing.assert_allclose(losses["main"], right.losses, rtol=1e-9)
    assert_same(ends["main"], right.snapshots[8])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stage_from_a_snapshot_in_mid_training(overlap: bool, tmp_path: Path) -> None:
    """Which lacks the last update where gradients wait."""
    texts = {name: SOLVER.format(net="lenet", prefix=name, length=8, more="") for name in ("solver", "solver_b")}
    readme = "mpirun -np 2 caffe train --solver solver.prototxt --weights first.caffemodel\n"
    readme += "mpirun -np 2 caffe train --solver solver_b.prototxt --weights x/solver_iter_4.caffemodel\n"
    right = caffes(tmp_path, "lenet", 2, overlap, texts, readme)
    losses, ends = trained(tmp_path, *(["--overlap"] if overlap else []))
    for stage, name in (("main", "solver"), ("b", "solver_b")):
        np.testing.assert_allclose(losses[stage], right[name].losses, rtol=1e-9)
        assert_same(ends[stage], right[name].snapshots[8])
