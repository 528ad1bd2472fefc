"""`eval NET --weights FILE` next to the loss of real Caffe after its last update."""

import csv
import json

import caffe_nets
import numpy as np
import pytest
import tiny
from click.testing import CliRunner
from stored_help import make_lmdb

from stagerun.cli import main

RUN = caffe_nets.GOLDEN / "lenet_m09_A"
STAGE = """name: "x" model { caffe_net: "lenet.prototxt" } data { train { source: "test" } val { source: "test" } }
solver { base_lr: 1 lr_policy: "fixed" max_iter: 1 } stage { name: "a" solver_param { } } stage { name: "b" from: "" solver_param { } }"""


@pytest.fixture
def folder(tmp_path):
    """The last batch that Caffe trained on."""
    stored = np.load(tiny.STORED)
    make_lmdb(tmp_path / "test", stored["images"][9600:].reshape(-1, 28, 28, 1), stored["labels"][9600:])
    net = (caffe_nets.GOLDEN / "lenet.prototxt").read_text()
    (tmp_path / "elsewhere.prototxt").write_text(net)
    for phase in ("train", "test"):
        net = net.replace(f"data/fmnist_{phase}_lmdb", "test")
    (tmp_path / "lenet.prototxt").write_text(net)
    (tmp_path / "schedule.prototxt").write_text(STAGE)
    return tmp_path


def evaluated(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["eval", *map(str, words), "--threads", "1", "--json"])
    return done.exit_code, done.output


@pytest.mark.parametrize("what", [["lenet.prototxt"], ["elsewhere.prototxt", "--data", "test"], [".", "--stage", "b"]])
def test_the_loss_is_caffes(what, folder, monkeypatch):
    monkeypatch.chdir(folder)
    (*_, last) = csv.DictReader((RUN / "trace.csv").read_text().splitlines())
    code, output = evaluated(*what, "--weights", RUN / "end.caffemodel")
    assert code == 0, output
    (row,) = json.loads(output)["evaluations"]
    assert row["images"] == 64 and row["loss"] == pytest.approx(float(last["loss"]), rel=1e-5)


def test_what_is_refused(folder):
    (folder / "x.caffemodel").write_bytes((RUN / "end.caffemodel").read_bytes()[:-9])
    net, end = folder / "lenet.prototxt", RUN / "end.caffemodel"
    for words, code, text in (
        ([net, "--weights", folder / "x.caffemodel"], 65, "ends too early"),
        ([net, "--weights", folder / "missing.caffemodel"], 64, "no such file"),
        ([net, "--weights", caffe_nets.GOLDEN / "bnnet_m09_A" / "end.caffemodel"], 64, "has another shape"),
        ([folder / "elsewhere.prototxt", "--weights", end], 64, "fmnist_train_lmdb"),
        ([folder, "--weights", end], 64, "name it with --stage"),
        ([folder / "no.prototxt", "--weights", end], 64, "no.prototxt"),
        ([net, "--weights", end, "--out", folder], 64, "--weights with --out"),
    ):
        result = evaluated(*words)
        assert result[0] == code and text in result[1], result
