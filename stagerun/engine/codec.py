"""Tensors <-> bytes, in the safetensors format: no pickle, nothing that executes; and 64-bit digests of them.

A file is the length of its header (uint64, little-endian), the header (JSON: of each tensor type, shape, and where its bytes begin
and end behind the header; spaces up to a multiple of 8), and the tensors' bytes, the widest type first, then by name.

A digest is the same on ranks that hold the same bits, whatever their device and memory format: XXH3 by Yann Collet
(github.com/Cyan4973/xxHash). It depends on every bit and on its place, so that no two changes cancel as they may in a sum; by chance two
states have the same one once in 2^64. It is not a defence against an attacker.
"""

import json
import struct
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from xxhash import xxh3_64_intdigest

# The format's names of types, in the order of its library's enumeration (huggingface/safetensors: tensor.rs), widest last.
TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
_ORDER = {dtype: -place for place, dtype in enumerate(TYPES)}


class Packed:
    """Room in host memory for tensors, laid out as a .safetensors file: what is copied to `tensors` stands in `data`."""

    def __init__(self, like: Mapping[str, Tensor], pinned: bool = False) -> None:
        """With the names, shapes and types of `like`. `pinned`: memory that a GPU can write to by itself. KeyError for a type that is
        not in TYPES."""
        ordered = sorted(like, key=lambda name: (_ORDER[like[name].dtype], name))
        places: dict[str, tuple[int, int]] = {}
        end = 0
        for name in ordered:
            begin, end = end, end + like[name].numel() * like[name].element_size()
            places[name] = begin, end
        header = {
            name: {
                "dtype": TYPES[like[name].dtype],
                "shape": list(like[name].shape),
                "data_offsets": list(places[name]),
            }
            for name in ordered
        }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        # Written to here and now: memory that was never touched is handed out page by page at the first copy, which makes that
        # several times slower, and training would wait for it.
        self._file = torch.empty(start + end, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._file[:start] = torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
        body = self._file[start:]
        self.tensors = {
            name: body[slice(*places[name])].view(tensor.dtype).view(tensor.shape) for name, tensor in like.items()
        }

    @property
    def data(self) -> memoryview:
        """The bytes of the file, as they are at any time; not a copy."""
        return self._file.numpy().data


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a .safetensors file."""
    packed = Packed(tensors)
    for name, tensor in tensors.items():
        packed.tensors[name].copy_(tensor)
    return bytes(packed.data)


# Bytes of names, types and shapes: of some thousands of tensors 500 kB. The format allows 100 MB, which would take gigabytes in memory.
MOST_HEADER = 4_000_000


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. ValueError if it is none. In memory of a small multiple of its size."""
    if int.from_bytes(data[:8], "little") > MOST_HEADER:
        raise ValueError(f"not a safetensors file of a network: its header has more than {MOST_HEADER} bytes")
    try:
        return load(data)
    except SafetensorError as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    except KeyError as error:  # the format knows it, this build of safetensors or torch does not
        raise ValueError(f"a tensor is of type {error}, which can't be read here") from error
    except TypeError as error:  # a dimension beyond int64, beside a zero that makes the size fit
        raise ValueError(f"a tensor has an impossible shape: {error}") from error


def digest(tensor: Tensor) -> int:
    """The digest of the elements' bytes in the order of the indices, the last one fastest; by one thread."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:  # numpy doesn't know it
        host = host.view(torch.int16)
    return xxh3_64_intdigest(np.ascontiguousarray(host.numpy()).reshape(-1).view(np.uint8).data)


def digest_there(tensor: Tensor) -> int:
    """A digest that is computed where the tensor is: `digest` on the CPU, elsewhere `mixed`, which copies one number to the host."""
    return digest(tensor) if tensor.device.type == "cpu" else mixed(tensor)


def mixed(tensor: Tensor) -> int:
    """The sum of all 64-bit words modulo 2^64, the same on any device. Each is mixed with its place by the finalizer of SplitMix64 (Steele,
    Lea and Flood, OOPSLA 2014). The finalizer is one to one, so a change within one word never goes unseen."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    if data.storage_offset() % 8:
        data = data.clone()
    rest = data.new_zeros(8)
    rest[: data.numel() - whole] = data[whole:]
    words = data[:whole].view(torch.int64)
    total = mix(rest.view(torch.int64), -1 - data.numel()).sum()
    step = 1 << (14 if tensor.device.type == "cpu" else 22)  # temporaries stay in a CPU's cache, and small on a GPU
    for start in range(0, words.numel(), step):
        total += mix(words[start : start + step], start).sum()
    return int(total) & (1 << 64) - 1


def mix(words: Tensor, start: int) -> Tensor:
    """int64 words from place `start` on, mixed with their places."""
    places = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    x = places.mul_(-0x61C8864680B583EB).add_(words)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def combined(digests: Mapping[str, int]) -> int:
    """One digest of all of them and their names; their order doesn't count."""
    return xxh3_64_intdigest("".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests)).encode())
