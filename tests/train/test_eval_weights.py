"""`eval NET --weights FILE` beside real Caffe's loss after its last update."""

import csv
import json
from pathlib import Path

import caffe_nets
import numpy as np
import pytest
from click.testing import CliRunner
from facade import caffe_pb2, write_lmdb

from stagerun.cli import main

RUN = caffe_nets.GOLDEN / "lenet_m09_A"
STAGE = """name: "x" model { caffe_net: "lenet.prototxt" } data { train { source: "data/test" } val { source: "data/test" } }
solver { base_lr: 1 lr_policy: "fixed" max_iter: 1 } stage { name: "a" solver_param { } } stage { name: "b" from: "" solver_param { } }"""


@pytest.fixture
def folder(tmp_path):
    """The last batch that Caffe trained on, then others."""
    stored = np.load(Path(__file__).parents[1] / "golden" / "fashion_9664.npz")
    order = [*range(9600, 9664), *range(100)]
    images, labels = stored["images"], stored["labels"]
    datums = [
        caffe_pb2.Datum(channels=1, height=28, width=28, data=images[i].tobytes(), label=int(labels[i])) for i in order
    ]
    (tmp_path / "data").mkdir()
    write_lmdb(str(tmp_path / "data" / "test"), [datum.SerializeToString() for datum in datums])
    net = (caffe_nets.GOLDEN / "lenet.prototxt").read_text()
    net = net.replace("batch_size: 100", "batch_size: 64").replace("fmnist_test_lmdb", "test")
    (tmp_path / "lenet.prototxt").write_text(net)
    (tmp_path / "schedule.prototxt").write_text(STAGE)
    return tmp_path


def evaluated(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["eval", *map(str, words), "--threads", "1", "--json"])
    return done.exit_code, done.output


@pytest.mark.parametrize("what", [["lenet.prototxt"], [".", "--stage", "b"]])
def test_the_loss_is_caffes(what, folder):
    name, *more = what
    (*_, last) = csv.DictReader((RUN / "trace.csv").read_text().splitlines())
    words = [folder / name, *more, "--weights", RUN / "end.caffemodel"]
    code, output = evaluated(*words, "--iterations", 1)
    assert code == 0, output
    (row,) = json.loads(output)["evaluations"]
    assert row["images"] == 64 and row["loss"] == pytest.approx(float(last["loss"]), rel=1e-5)
    code, output = evaluated(*words)
    assert code == 0 and json.loads(output)["evaluations"][0]["images"] == 164, output


def test_what_is_refused(folder):
    (folder / "x.caffemodel").write_bytes((RUN / "end.caffemodel").read_bytes()[:-9])
    (folder / "elsewhere.prototxt").write_text((caffe_nets.GOLDEN / "lenet.prototxt").read_text())
    net, end = folder / "lenet.prototxt", RUN / "end.caffemodel"
    for words, code, said in (
        ([net, "--weights", folder / "x.caffemodel"], 65, "ends too early"),
        ([net, "--weights", folder / "gone.caffemodel"], 64, "no such file"),
        (
            [net, "--weights", caffe_nets.GOLDEN / "bnnet_m09_A" / "end.caffemodel"],
            64,
            "has another shape: `conv1.weight` 8 x 1 x 3 x 3 there and 8 x 1 x 5 x 5 here",
        ),
        ([folder / "elsewhere.prototxt", "--weights", end], 64, "are not here"),
        ([folder, "--weights", end], 64, "name one with --stage"),
        ([folder / "no.prototxt", "--weights", end], 64, "can't be read"),
        ([net, "--weights", end, "--out", folder], 64, "--weights with --out"),
        ([net, "--iterations", 3], 64, "--iterations without --weights"),
    ):
        assert (found := evaluated(*words))[0] == code and said in found[1], found
