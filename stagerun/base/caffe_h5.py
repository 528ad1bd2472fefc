"""The same files as Caffe writes them with `snapshot_format: HDF5`: .caffemodel.h5 and .solverstate.h5. Needs h5py. What is wrong with a
file is a ValueError.

They say no types of layers, and no order: groups come by name.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stagerun.base.caffe_file import MOST_LAYERS, Blob, CaffeNet, Layer, SolverState
from stagerun.base.errors import UsageError

MAGIC = b"\x89HDF\r\n\x1a\n"


def read_net(data: bytes) -> CaffeNet:
    with _opened(data) as file:
        groups = _group(file, "data")
        return CaffeNet(
            "",
            tuple(
                Layer(name, "", tuple(_numbered(_group(groups, name), name, len(data))), fraction=None)
                for name in _names(groups)
            ),
        )


def read_state(data: bytes) -> SolverState:
    with _opened(data) as file:
        learned = _dataset(file, "learned_net", len(data)).asstr()[()] if "learned_net" in file else ""
        return SolverState(
            int(_dataset(file, "iter", len(data))[()]),
            str(learned),
            tuple(_numbered(_group(file, "history"), "history", len(data))),
            int(_dataset(file, "current_step", len(data))[()]) if "current_step" in file else 0,
        )


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise UsageError("HDF5 files are read with the package h5py", "pip install 'stagerun[caffe]'") from None
    try:
        with h5py.File(io.BytesIO(data), "r") as file:
            yield file
    except ValueError:
        raise
    except Exception as error:  # h5py lets any of Python's through for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"it is no whole HDF5 file of Caffe's: {reason}") from error


def _names(group: Any) -> list[str]:
    if len(group) > MOST_LAYERS:
        raise ValueError(f"it has more than {MOST_LAYERS} layers or blobs")
    return list(group)


def _member(group: Any, name: str, kind: str) -> Any:
    import h5py

    # A soft or an external link would read another file.
    if name not in group or not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"it has no {kind} `{name}`")
    return group[name]


def _group(group: Any, name: str) -> Any:
    import h5py

    found = _member(group, name, "group")
    if not isinstance(found, h5py.Group):
        raise ValueError(f"`{name}` in it is not a group")
    return found


def _dataset(group: Any, name: str, size: int) -> Any:
    """As Caffe writes it, its numbers one after the other: a compressed or virtual one could be larger than any memory."""
    import h5py

    found = _member(group, name, "dataset")
    if not isinstance(found, h5py.Dataset):
        raise ValueError(f"`{name}` in it is not a dataset")
    elsewhere = found.is_virtual or found.external or found.dtype.hasobject  # texts of any length lie in a heap
    if found.chunks is not None or elsewhere or max(found.size, found.nbytes) > size:
        raise ValueError(f"dataset `{found.name}` is not as Caffe writes it")
    return found


def _numbered(group: Any, where: str, size: int) -> Iterator[Blob]:
    names = _names(group)
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise ValueError(
            f"the blobs of `{where}` are not numbered from 0: does it share one with another layer? The binary form says that"
        )
    total = 0
    for i in range(len(names)):
        dataset = _dataset(group, str(i), size)
        if dataset.dtype not in (np.float32, np.float64):
            raise ValueError(f"blob {i} of `{where}` is {dataset.dtype}, not float or double")
        total += dataset.nbytes
        if total > size:
            raise ValueError("its blobs say that they are larger than the file")
        values = dataset[()]
        yield Blob(tuple(values.shape), np.ascontiguousarray(values).reshape(-1))
