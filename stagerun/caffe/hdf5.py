"""Caffe's files in HDF5, of layers without types and by name. Needs h5py. A damaged file is a ValueError."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from stagerun.base.errors import UsageError
from stagerun.caffe.binary import MOST, Blob, Layer, SolverState


def read_net(data: bytes) -> tuple[Layer, ...]:
    with _opened(data) as file:
        groups = _member(file, "data", "Group")
        blobs = ((name, _numbered(_member(groups, name, "Group"), name, len(data))) for name in _names(groups))
        return tuple(Layer(name, "", tuple(found), fraction=None) for name, found in blobs)


def read_state(data: bytes) -> SolverState:
    with _opened(data) as file:
        learned = _dataset(file, "learned_net", len(data)).asstr()[()] if "learned_net" in file else ""
        history = _numbered(_member(file, "history", "Group"), "history", len(data))
        step = int(_dataset(file, "current_step", len(data))[()]) if "current_step" in file else 0
        return SolverState(int(_dataset(file, "iter", len(data))[()]), str(learned), tuple(history), step)


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
    if len(group) > MOST:
        raise ValueError(f"it has more than {MOST} layers or blobs")
    return list(group)


def _member(group: Any, name: str, kind: str) -> Any:
    """Return a Group or a Dataset. A soft or an external link would read another file."""
    import h5py

    alone = name in group and isinstance(group.get(name, getlink=True), h5py.HardLink)
    if alone and isinstance(found := group[name], getattr(h5py, kind)):
        return found
    raise ValueError(f"it has no {kind.lower()} `{name}`")


def _dataset(group: Any, name: str, size: int) -> Any:
    """Return one as Caffe writes it, its numbers in a row: a compressed or virtual one could be larger than any memory."""
    found = _member(group, name, "Dataset")
    elsewhere = found.is_virtual or found.external or found.dtype.hasobject  # texts of any length lie in a heap
    if found.chunks is not None or elsewhere or max(found.size, found.nbytes) > size:
        raise ValueError(f"dataset `{found.name}` is not as Caffe writes it")
    return found


def _numbered(group: Any, where: str, size: int) -> Iterator[Blob]:
    """Yield the blobs 0, 1, ... of a group. `size`: that of the file."""
    names = _names(group)
    if sorted(names) != sorted(map(str, range(len(names)))):
        text = f"the blobs of `{where}` are not numbered from 0: does it share one with another layer?"
        raise ValueError(f"{text} The binary form says that")
    total = 0
    for i in range(len(names)):
        dataset = _dataset(group, str(i), size)
        if dataset.dtype not in (np.float32, np.float64):
            raise ValueError(f"blob {i} of `{where}` is {dataset.dtype}, not float or double")
        total += dataset.nbytes
        if total > size:
            raise ValueError("its blobs say that they are larger than the file")
        yield Blob(tuple(dataset.shape), np.ascontiguousarray(dataset[()]).reshape(-1))
