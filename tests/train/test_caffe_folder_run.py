"""A folder of Caffe's as it lies there, net, solvers, first weights and README, imported and trained: real Caffe's weights come out."""

import shutil
from pathlib import Path

import caffe_nets
import numpy as np
from click.testing import CliRunner
from safetensors.numpy import load_file

from stagerun.cli import main
from stagerun.data.write import write_lmdb
from stagerun.language.proto import caffe_pb2

GOLDEN = caffe_nets.GOLDEN
README = """
caffe train --solver=solver_A.prototxt --weights=init_lenet_iter_0.caffemodel
caffe train --solver=solver_B.prototxt --weights=lenet_m09_A/lenet_m09_A_iter_150.caffemodel
"""


def stagerun(*words: object) -> None:
    done = CliRunner().invoke(main, [str(word) for word in words], prog_name="stagerun")
    assert done.exit_code == 0, done.output


def test_it_trains_to_the_weights_of_real_caffe(tmp_path: Path) -> None:
    folder, out = tmp_path / "caffe", tmp_path / "schedule"
    (folder / "nets").mkdir(parents=True)
    shutil.copy(GOLDEN / "lenet.prototxt", folder / "nets")
    shutil.copy(GOLDEN / "init_lenet_iter_0.caffemodel", folder)
    (folder / "README").write_text(README)
    for name in "AB":
        shutil.copy(GOLDEN / f"lenet_m09_{name}" / "solver.prototxt", folder / f"solver_{name}.prototxt")
    stored = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
    for part, count in (("train", 9600), ("test", 100)):
        shown = zip(stored["images"][:count], stored["labels"], strict=False)
        records = [caffe_pb2.Datum(channels=1, height=28, width=28, data=i.tobytes(), label=int(n)) for i, n in shown]
        write_lmdb(str(folder / "data" / f"fmnist_{part}_lmdb"), [record.SerializeToString() for record in records])

    stagerun("import", "caffe", folder, "--out", out)
    changes = ("precision=FP64", "snapshot=0", "test_interval=0", "channels_last=false")
    sets = [word for stage in "AB" for change in changes for word in ("--set", f"{stage}.{change}")]
    stagerun("run", out, *sets, "--out", tmp_path / "run", "--nproc", 1)
    # Caffe's rates are float32, 6e-8 on each; what that comes to grows on the way, as ties of max pooling fall otherwise.
    for name, most in (("A", 2e-5), ("B", 5e-4)):
        (snapshot,) = (tmp_path / "run" / "snapshots").glob(f"{name}-*")
        trained = load_file(snapshot / "model.safetensors")
        for tensor, value in caffe_nets.expected(GOLDEN / f"lenet_m09_{name}" / "end.caffemodel").items():
            np.testing.assert_allclose(trained[tensor], value, rtol=0, atol=most, err_msg=f"{name} {tensor}")


def test_weights_of_another_shape_stop_it_and_other_layers_are_passed_over(tmp_path: Path) -> None:
    """Caffe aborts at the one, and passes over the other."""
    folder, out = tmp_path / "caffe", tmp_path / "schedule"
    (folder / "nets").mkdir(parents=True)
    weights, net = GOLDEN / "init_lenet_iter_0.caffemodel", (GOLDEN / "lenet.prototxt").read_text()
    shutil.copy(weights, folder)
    shutil.copy(GOLDEN / "lenet_m09_A" / "solver.prototxt", folder)
    (folder / "README").write_text(f"caffe train --solver=solver.prototxt --weights={weights.name}\n")
    for part in ("train", "test"):
        record = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=1).SerializeToString()
        write_lmdb(str(folder / "data" / f"fmnist_{part}_lmdb"), [record] * 64)
    for before, after, code in (('"ip2"', '"fc8"', 0), ("num_output: 64", "num_output: 65", 64)):
        (folder / "nets" / "lenet.prototxt").write_text(net.replace(before, after))
        stagerun("import", "caffe", folder, "--out", out)
        done = CliRunner().invoke(main, ["plan", str(out), "--weights"])
        assert done.exit_code == code, done.output
        shutil.rmtree(out)
    assert "`ip1.weight` 64 x 256 there and 65 x 256 here" in done.output
