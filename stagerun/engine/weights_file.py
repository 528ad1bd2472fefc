"""The tensors in a file that someone else wrote: safetensors, what `torch.save` wrote, or a .caffemodel. The one place where such a file is
read; nothing in it is run (`weights_only`)."""

import io
import pickle
import struct
import warnings
import zipfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagerun.base.errors import DataError, listing
from stagerun.base.weights import is_caffes, is_safetensors
from stagerun.base.wings import require_wing
from stagerun.engine.codec import decode

# What a training script wraps a state_dict in.
_AROUND = ("state_dict", "model", "model_state_dict")
_ALONE = "save `model.state_dict()` alone, or as .safetensors"


def tensors_in(data: bytes, name: str, of: Any = None) -> dict[str, Tensor]:
    """By their names there, on the CPU. DataError where these are not a network's tensors; `name` is the file's. `of`: the net of Caffe's that
    they are for."""
    if not is_safetensors(data[:9]) and (data[:2] == b"PK" or data[:1] == b"\x80"):
        return _of_torch(data, name)
    try:
        if is_caffes(data[:9], name):
            arrays = require_wing("caffe.blob_names.tensors")(data, of)
            # Copies: those look into the file, which torch could then write to.
            return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
        return decode(data)
    except ValueError as error:
        hint = "stagerun reads .safetensors, .caffemodel, and what `torch.save` wrote"
        raise DataError(f"{name}: {error}", hint) from error


# Bytes of the pickle in a zip of `torch.save`: a tensor takes about 150, and reading takes 3 s a megabyte at worst.
_MOST_PICKLED = 1 << 20


def _require_plain_zip(data: bytes, name: str) -> None:
    """DataError for a zip that `torch.save` doesn't write: one that unpacks to much more than it is, or holds a pickle that takes long."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, struct.error, RuntimeError) as error:
        raise DataError(f"{name} is not a whole file of `torch.save`: {error}", "copy it again") from error
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > len(data):
            raise DataError(f"{name}: {member.filename} is compressed, which `torch.save` doesn't do", _ALONE)
        if member.filename.endswith(".pkl") and member.file_size > _MOST_PICKLED:
            raise DataError(f"{name} holds more than tensors: {member.filename} has {member.file_size} bytes", _ALONE)


def _of_torch(data: bytes, name: str) -> dict[str, Tensor]:
    if data[:2] == b"PK":
        _require_plain_zip(data, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            held = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DataError(f"{name} holds more than tensors, which is not read: it could run code", _ALONE) from error
    except (RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__).partition(". ")[0]
        raise DataError(f"{name} is not a whole file of `torch.save`: {first}", "copy it again") from error
    for candidate in (held, *(held.get(key) for key in _AROUND if isinstance(held, dict))):
        if (found := _state_dict(candidate)) is not None:
            return found
    what = "it is no dict"
    if isinstance(held, dict):
        what = f"it holds {listing([str(key) for key in list(held)[:6]], 'and')}"
    hint = f"a state_dict is looked for in the file itself, and under {listing(_AROUND)}; {_ALONE}"
    raise DataError(f"{name} has no state_dict: {what}", hint)


def _state_dict(held: object) -> dict[str, Tensor] | None:
    if not isinstance(held, dict) or not held:
        return None
    whole = all(isinstance(key, str) and isinstance(value, Tensor) for key, value in held.items())
    return {key: value.detach() for key, value in held.items()} if whole else None
