"""Caffe's HDF5 files."""

import io
from pathlib import Path

import numpy as np
import pytest

from stagerun.base import caffe_blobs, caffe_h5


def h5(blobs: dict[str, np.ndarray], **more: object) -> bytes:
    h5py = pytest.importorskip("h5py")
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        for name, values in {**blobs, **more}.items():
            file[name] = values
    return held.getvalue()


def test_hdf5() -> None:
    one = np.arange(6, dtype=np.float32).reshape(2, 3)
    net = caffe_blobs.net_in(
        h5({"data/fc/0": one, "data/fc/1": one[0], "data/bn/0": one[0], "data/bn/1": one[0], "data/bn/2": one[0, 2:]})
    )
    found = caffe_blobs.tensors(net)
    np.testing.assert_array_equal(found["fc.weight"], one)
    np.testing.assert_array_equal(found["bn.running_var"], one[0] / 2)
    state = caffe_h5.read_state(h5({"history/0": one}, iter=7, learned_net="x.caffemodel.h5", current_step=1))
    assert (state.iter, state.learned_net, state.current_step) == (7, "x.caffemodel.h5", 1)


def test_hostile_hdf5(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    held = io.BytesIO()
    with h5py.File(held, "w") as file:
        file.create_dataset("data/a/0", (1 << 40,), np.float32, chunks=(1024,))
        file["data/b/0"] = h5py.ExternalLink("/etc/passwd", "/x")
    whole = h5({"data/fc/0": np.ones(1000, np.float32)})
    for data in (held.getvalue(), whole[:-100], whole[:200], whole.replace(b"data", b"date")):
        with pytest.raises(ValueError):
            caffe_blobs.net_in(data)
