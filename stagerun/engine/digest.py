"""A 64-bit digest of each tensor of a state: the same on ranks that hold the same bits, whatever their device and memory format.

XXH3 by Yann Collet (github.com/Cyan4973/xxHash). It depends on every bit and on its place, so that no two changes cancel as they may
in a sum; by chance two states have the same one once in 2^64. It is not a defence against an attacker.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest


def digest(tensor: Tensor) -> int:
    """The digest of the elements' bytes in the order of the indices, the last one fastest; by one thread."""
    return _digest(_on_host(tensor))


def digest_and_look(tensor: Tensor) -> tuple[int, bool]:
    """The digest, and whether all elements are finite, looked at while a cache has them. A finite sum has finite terms only; a sum that
    isn't finite may have overflowed."""
    array = _on_host(tensor)
    if tensor.dtype == torch.bfloat16:
        return _digest(array), not (array & 0x7F80 == 0x7F80).any()  # all ones in the exponent
    with np.errstate(all="ignore"):
        return _digest(array), bool(np.isfinite(array.sum()) or np.isfinite(array).all())


def _on_host(tensor: Tensor) -> np.ndarray:
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:  # numpy doesn't know it
        host = host.view(torch.int16)
    return np.ascontiguousarray(host.numpy()).reshape(-1)


def _digest(array: np.ndarray) -> int:
    return xxh3_64_intdigest(array.view(np.uint8).data)


def combined(digests: Mapping[str, int]) -> int:
    """One digest of all of them and their names; their order doesn't count."""
    return xxh3_64_intdigest("".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests)).encode())
