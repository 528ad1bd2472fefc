"""Caffe's HDF5 files."""

import io
import random
import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from facade import Origin, binary, blob_names, hdf5, looked_at, planned_transfer, remember
from net_texts import between, net_from

from stagerun.language import load


def h5(blobs: dict[str, np.ndarray], **more: object) -> bytes:
    h5py = pytest.importorskip("h5py")
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        for name, values in {**blobs, **more}.items():
            file[name] = values
    return held.getvalue()


def test_hdf5():
    one = np.arange(6, dtype=np.float32).reshape(2, 3)
    net = h5({"data/fc/0": one, "data/fc/1": one[0], "data/bn/0": one[0], "data/bn/1": one[0], "data/bn/2": one[0, 2:]})
    found = blob_names.tensors(net)
    np.testing.assert_array_equal(found["fc.weight"], one)
    np.testing.assert_array_equal(found["bn.running_var"], one[0] / 2)
    state = hdf5.read_state(h5({"history/0": one}, iter=7, learned_net=np.bytes_("x.caffemodel.h5"), current_step=1))
    assert (state.iter, state.learned_net, state.current_step) == (7, "x.caffemodel.h5", 1)


def test_a_net_says_what_hdf5_does_not():
    """The net says of which kind a layer is, and by how much its statistics move."""
    text = between(
        'layer { name: "b" type: "Bias" bottom: "data" top: "b" }',
        'layer { name: "bn" type: "BatchNorm" bottom: "b" top: "last" batch_norm_param { moving_average_fraction: 0.5 } }',
    )
    three, factor = np.ones(3, np.float32), np.full(1, 1.75, np.float32)
    file = h5({"data/b/0": three, "data/bn/0": three, "data/bn/1": three, "data/bn/2": factor})
    found = blob_names.tensors(file, net_from(text))
    assert set(found) == {"b.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert found["bn.num_batches_tracked"] == 3
    assert blob_names.tensors(file)["bn.num_batches_tracked"] == 1_000_000


def test_hostile_hdf5(tmp_path):
    h5py = pytest.importorskip("h5py")
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file.create_dataset("data/a/0", (1 << 40,), np.float32, chunks=(1024,))
        file["data/b/0"] = h5py.ExternalLink("/etc/passwd", "/x")
    whole = h5({"data/fc/0": np.ones(1000, np.float32)})
    for data in (held.getvalue(), whole[:-100], whole[:200], whole.replace(b"data", b"date")):
        with pytest.raises(ValueError):
            blob_names.net_in(data)


def test_a_state_in_hdf5_goes_on_with_a_net(tmp_path):
    """Groups come by name, and the net says which layer is first."""
    golden = Path(__file__).parents[1] / "golden" / "caffe"
    start = golden / "lenet_m09_A_resume75"
    state = binary.read_state((start / "start.solverstate").read_bytes())
    net = (start / "start.caffemodel").read_bytes()
    blobs = {
        f"data/{layer.name}/{i}": b.data.reshape(b.shape)
        for layer in binary.read_net(net)
        for i, b in enumerate(layer.blobs)
    }
    (tmp_path / "x.caffemodel.h5").write_bytes(h5(blobs))
    history = {f"history/{i}": blob.data.reshape(blob.shape) for i, blob in enumerate(state.history)}
    held = h5(history, iter=75, learned_net=np.bytes_("/gone/x.caffemodel.h5"), current_step=0)
    (tmp_path / "x.solverstate.h5").write_bytes(held)
    shutil.copy(golden / "lenet.prototxt", tmp_path)
    (tmp_path / "schedule.prototxt").write_text(
        """name: "x" model { caffe_net: "lenet.prototxt" num_classes: 10 channels: 1 } data { train { source: "/d" images: 640 } }
        solver { batch_size: 64 device_batch_size: 64 base_lr: 0.05 lr_policy: "fixed" max_iter: 150 momentum: 0.9
        transform_param { crop_size: 28 } } stage { name: "a" solver_param { solverstate: "x.solverstate.h5" } }"""
    )
    schedule = looked_at(load(tmp_path), tmp_path / "out")
    stage = schedule.stages[0]
    made, mistakes = planned_transfer(schedule, stage)
    assert stage.begins == 75 and not mistakes and len(made.of(Origin.FILE)) == 8
    names = blob_names.learnable(net)
    live = {f"steps/{name}": torch.zeros(blob.shape) for name, blob in zip(names, state.history, strict=True)}
    assert names[0] == "conv1.weight"
    remember(stage, live)
    for name, blob in zip(names, state.history, strict=True):
        np.testing.assert_array_equal(live[f"steps/{name}"].numpy(), blob.data.reshape(blob.shape).astype(np.float32))


def test_a_damaged_file_is_one_error():
    """Whatever h5py raises of it; numbers of no size are no reason to read for minutes."""
    one = np.ones((3, 4), np.float32)
    net = h5({f"data/l{i}/{j}": one for i in range(4) for j in range(2)})
    state = h5(
        {f"history/{i}": one for i in range(4)}, iter=7, learned_net=np.bytes_("x.caffemodel.h5"), current_step=1
    )
    drawn = random.Random(1)
    for data, read in ((net, blob_names.net_in), (state, hdf5.read_state)):
        for _ in range(300):
            damaged = bytearray(data)
            for at in (drawn.randrange(len(data)) for _ in range(drawn.choice((1, 2, 8)))):
                damaged[at : at + 8] = drawn.choice(
                    (bytes([drawn.randrange(256)]) + damaged[at + 1 : at + 8], b"\xff" * 8)
                )
            with suppress(ValueError):
                read(bytes(damaged))
