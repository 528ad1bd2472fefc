"""Training runs of real Caffe in double precision, repeated by the engine from the nets' own files: loss at every iteration and final
weights.

The runs, their data and order are described in the tests' golden/caffe/README.md.
"""

import csv
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from caffe_nets import GOLDEN, expected, history, load, net_of, rules

from stagerun.base.events import Iterated
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Determinism, Precision, Solver, Transform
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.images import Normalise
from stagerun.engine.loop import StageLoop, train
from stagerun.engine.state import make_state
from stagerun.engine.update import Arithmetic
from stagerun.schedule import make_knobs

CPU = torch.device("cpu")


def f32(x: float) -> float:
    """Caffe's solver fields are float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


@dataclass
class Batch:
    images: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    lighting: None = None
    cutout: None = None
    crop: None = None


@pytest.fixture(scope="module")
def fashion() -> tuple[np.ndarray, np.ndarray]:
    stored = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
    return stored["images"], stored["labels"]


def batches(fashion: tuple[np.ndarray, np.ndarray], size: int = 64) -> Iterator[Batch]:
    """Records 64k .. 64k+63 for iteration k of a process, as Caffe reads an unshuffled LMDB."""
    images, labels = fashion
    for start in range(0, len(images), size):
        part = slice(start, start + size)
        yield Batch(
            images[part].reshape(-1, 28, 28, 1),
            labels[part].astype(np.int64),
            np.arange(start, start + len(labels[part])),
        )


LENET, BNNET = (net_of(GOLDEN / f"{name}.prototxt") for name in ("lenet", "bnnet"))
BASE = Solver(
    base_lr=0.0,
    lr_policy="fixed",
    max_iter=150,
    batch_size=64,
    device_batch_size=64,
    momentum=f32(0.9),
    weight_decay=f32(0.0005),
    param=rules(LENET),
    transform=Transform(scale=0.00390625),
    test_batch_size=64,
    random_seed=1,
    precision=Precision.FP64,
)
LENET_A = replace(
    BASE, base_lr=f32(0.05), lr_policy="poly_cyc", power=1.0, lr_iter=360, warmup_iter=30, warmup_start_lr=f32(0.005)
)
INIT_LENET, INIT_BNNET = GOLDEN / "init_lenet_iter_0.caffemodel", GOLDEN / "init_bnnet_iter_0.caffemodel"
RUNS = {
    "lenet_m09_A": (LENET, INIT_LENET, LENET_A),
    "lenet_m09_A_resume75": (LENET, GOLDEN / "lenet_m09_A_resume75" / "start.caffemodel", LENET_A),
    "lenet_m09_B": (
        LENET,
        GOLDEN / "lenet_m09_A" / "end.caffemodel",
        replace(BASE, base_lr=f32(0.03), lr_policy="poly", power=2.0),
    ),
    "lenet_m09_C": (
        LENET,
        GOLDEN / "lenet_m09_B" / "end.caffemodel",
        replace(BASE, base_lr=f32(0.01), lr_policy="poly", power=2.0, max_iter=100, weight_decay=f32(0.002)),
    ),
    "lenet_lrjump": (
        LENET,
        INIT_LENET,
        replace(BASE, base_lr=f32(0.05), lr_policy="multistep", gamma=f32(0.1), stepvalue=(40, 80), max_iter=120),
    ),
    "bnnet_m09_A": (
        BNNET,
        INIT_BNNET,
        replace(LENET_A, base_lr=f32(0.2), warmup_start_lr=f32(0.02), param=rules(BNNET)),
    ),
}


def run(name: str, fashion: tuple[np.ndarray, np.ndarray], knobs: Callable[[int], Knobs], solver: Solver, start: int):
    """Losses by iteration, and the state at the end."""
    net, weights, _ = RUNS[name]
    state = make_state(load(net, weights), solver, CPU)
    state.iter = start
    if start:
        with torch.no_grad():
            live = state.solver.history["steps"].values()
            for v, saved in zip(live, history(GOLDEN / name / "start.solverstate"), strict=True):
                v.copy_(torch.from_numpy(saved))
    loop = StageLoop(
        stage=name,
        max_iter=solver.max_iter,
        batch_size=64,
        epoch_images=60000,
        start_position=0,
        run=range(1),
        knobs=knobs,
        snapshot=0,
        test_interval=0,
        arithmetic=Arithmetic(
            logical_workers=1,
            normalise=Normalise(solver.transform, 1, CPU, torch.float64, channels_last=False),
            precision=Precision.FP64,
            clip_gradients=None,
            forward_seed=lambda position: position,
        ),
    )
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 1)
    losses = [
        event.loss
        for event in train(loop, state, batches(fashion), reducer, lambda: False)
        if isinstance(event, Iterated)
    ]
    return losses, state


def trace(name: str) -> tuple[list[float], list[float], int]:
    """Learning rates and losses; the last row of the file, an extra forward pass, is left out."""
    with open(GOLDEN / name / "trace.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"]]
    return [float(r["lr"]) for r in rows], [float(r["loss"]) for r in rows], int(rows[0]["iter"])


def assert_equal(name: str, losses: list[float], state, tolerance: float) -> None:
    np.testing.assert_allclose(losses, trace(name)[1], rtol=tolerance)
    live = state.model.state_dict()
    for key, value in expected(GOLDEN / name / "end.caffemodel").items():
        scale = np.abs(value).max()
        assert np.abs(live[key].numpy() - value).max() <= tolerance * max(scale, 1e-3), key


LATER = ("lenet_m09_B", "lenet_m09_C")  # which go on from the first


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LATER else n for n in RUNS])
def test_same_loss_and_weights_as_caffe(name, fashion):
    lrs, _, start = trace(name)
    solver = RUNS[name][2]
    losses, state = run(
        name, fashion, lambda i: Knobs(lrs[i - start], solver.momentum, solver.weight_decay), solver, start
    )
    assert_equal(name, losses, state, 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lenet_m09_A", "lenet_lrjump", "bnnet_m09_A"])
def test_end_to_end_with_the_learning_rate_of_the_solver_file(name, fashion):
    solver = RUNS[name][2]
    losses, state = run(name, fashion, make_knobs(solver), solver, trace(name)[2])
    assert_equal(name, losses, state, 2e-6)


@pytest.mark.long
def test_golden_runs_tell_caffes_momentum_from_torchs(fashion):
    from stagerun.base.recipe import MomentumForm

    name = "lenet_lrjump"
    solver = replace(RUNS[name][2], momentum_form=MomentumForm.TORCH)
    losses, _ = run(name, fashion, make_knobs(solver), solver, 0)
    assert max(abs(a - b) for a, b in zip(losses, trace(name)[1], strict=True)) > 0.1
