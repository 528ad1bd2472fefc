"""Tensors <-> bytes, in the safetensors format: no pickle, nothing that executes."""

from collections.abc import Mapping

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a .safetensors file. The tensors lie on the CPU, contiguous."""
    return save(dict(tensors))


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. ValueError if it is none."""
    try:
        return load(data)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    except KeyError as error:  # the format knows it, this build of safetensors or torch does not
        raise ValueError(f"a tensor is of type {error}, which can't be read here") from error
    except TypeError as error:  # a dimension beyond int64, beside a zero that makes the size fit
        raise ValueError(f"a tensor has an impossible shape: {error}") from error
