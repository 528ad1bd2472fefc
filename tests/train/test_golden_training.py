"""Training runs of real Caffe in double precision, from its own files as they are: solver file, net and first weights are imported, and
trained as `stagerun run` does. Loss at every iteration, and final weights.

The runs, their data and order are described in the tests' golden/caffe/README.md.
"""

import csv
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from caffe_nets import GOLDEN, expected
from click.testing import CliRunner
from safetensors.numpy import load_file

import stagerun
import stagerun.train.stage
from stagerun.base.events import Iterated
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Solver
from stagerun.cli import main
from stagerun.data.write import write_lmdb
from stagerun.language.proto import caffe_pb2
from stagerun.schedule import make_knobs

# From what each run started: the option of `caffe train`, and the file.
RUNS = {
    "lenet_m09_A": ("--weights", GOLDEN / "init_lenet_iter_0.caffemodel"),
    "lenet_m09_A_resume75": ("--snapshot", GOLDEN / "lenet_m09_A_resume75" / "start.solverstate"),
    "lenet_m09_B": ("--weights", GOLDEN / "lenet_m09_A" / "end.caffemodel"),
    "lenet_m09_C": ("--weights", GOLDEN / "lenet_m09_B" / "end.caffemodel"),
    "lenet_lrjump": ("--weights", GOLDEN / "init_lenet_iter_0.caffemodel"),
    "bnnet_m09_A": ("--weights", GOLDEN / "init_bnnet_iter_0.caffemodel"),
}
LATER = ("lenet_m09_B", "lenet_m09_C")  # which go on from the first


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    weights: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LMDBs that the nets name, as Caffe's converter writes them."""
    folder = tmp_path_factory.mktemp("data")
    stored = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
    for part, count in (("train", 9600), ("test", 100)):
        shown = zip(stored["images"][:count], stored["labels"], strict=False)
        records = [caffe_pb2.Datum(channels=1, height=28, width=28, data=i.tobytes(), label=int(n)) for i, n in shown]
        write_lmdb(str(folder / f"fmnist_{part}_lmdb"), [record.SerializeToString() for record in records])
    return folder


def trained(name: str, data: Path, tmp_path: Path, *changes: str) -> Trained:
    """Imports Caffe's folder with the run's files, unedited, and trains what came of it."""
    folder, schedule, out = tmp_path / "caffe", tmp_path / "schedule", tmp_path / "out"
    (folder / "nets").mkdir(parents=True)
    (folder / "data").symlink_to(data)
    net = "bnnet.prototxt" if name.startswith("bnnet") else "lenet.prototxt"
    option, start = RUNS[name]
    shutil.copy(GOLDEN / net, folder / "nets")
    shutil.copy(GOLDEN / name / "solver.prototxt", folder)
    shutil.copy(start, folder)
    if option == "--snapshot":  # the state names its weights
        shutil.copy(start.with_suffix(".caffemodel"), folder / "lenet_m09_A_iter_75.caffemodel")
    (folder / "README").write_text(f"caffe train --solver=solver.prototxt {option}={start.name}\n")
    done = CliRunner().invoke(main, ["import", "caffe", str(folder), "--out", str(schedule)], prog_name="stagerun")
    assert done.exit_code == 0, done.output
    here = ("precision=FP64", "channels_last=false", "snapshot=0", "test_interval=0")
    sets = [f"main.{change}" for change in (*here, *changes)]
    losses = [e.loss for e in stagerun.run(schedule, out, overrides=sets, threads=1) if isinstance(e, Iterated)]
    (snapshot,) = (out / "snapshots").iterdir()
    return Trained(losses, load_file(snapshot / "model.safetensors"))


def trace(name: str) -> tuple[list[float], list[float], int]:
    """Learning rates and losses, and the first iteration; the last row of the file, an extra forward pass, is left out."""
    with open(GOLDEN / name / "trace.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"]]
    return [float(r["lr"]) for r in rows], [float(r["loss"]) for r in rows], int(rows[0]["iter"])


def single(x: float) -> float:
    """Caffe's solver fields are float32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def in_single(solver: Solver) -> Solver:
    """A file that says 0.1 trains Caffe with float32's 0.1, even in double."""
    values = {field.name: getattr(solver, field.name) for field in fields(solver)}
    return replace(solver, **{name: single(value) for name, value in values.items() if isinstance(value, float)})


def caffes_knobs(name: str) -> Callable[[Solver], Callable[[int, int], Knobs]]:
    """In place of `make_knobs`: the rates that Caffe logged, and the momentum and decay of the solver file."""
    lrs, _, start = trace(name)

    def knobs_of(solver: Solver) -> Callable[[int, int], Knobs]:
        said = make_knobs(in_single(solver))
        return lambda iter, drops=0: replace(said(iter, drops), lr=lrs[iter - start])

    return knobs_of


def assert_equal(name: str, found: Trained, tolerance: float) -> None:
    np.testing.assert_allclose(found.losses, trace(name)[1], rtol=tolerance)
    for tensor, value in expected(GOLDEN / name / "end.caffemodel").items():
        most = tolerance * max(np.abs(value).max(), 1e-3)
        np.testing.assert_allclose(found.weights[tensor], value, rtol=0, atol=most, err_msg=tensor)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.long) if n in LATER else n for n in RUNS])
def test_same_loss_and_weights_as_caffe(name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stagerun.train.stage, "make_knobs", caffes_knobs(name))
    assert_equal(name, trained(name, data, tmp_path), 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lenet_m09_A", "lenet_lrjump", "bnnet_m09_A"])
def test_end_to_end_with_the_learning_rate_of_the_solver_file(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stagerun.train.stage, "make_knobs", lambda solver: make_knobs(in_single(solver)))
    assert_equal(name, trained(name, data, tmp_path), 2e-6)


@pytest.mark.long
def test_golden_runs_tell_caffes_momentum_from_torchs(data: Path, tmp_path: Path) -> None:
    found = trained("lenet_lrjump", data, tmp_path, "momentum_form=TORCH")
    assert np.abs(np.subtract(found.losses, trace("lenet_lrjump")[1])).max() > 0.1
