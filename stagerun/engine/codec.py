"""Tensors <-> bytes, in the safetensors format, without pickle; their 64-bit digests; and tensors in files from elsewhere.

A file is the length of its header (uint64, little-endian), the header (JSON: of each tensor type, shape, and where its bytes begin
and end behind the header; spaces up to a multiple of 8), and the tensors' bytes, the widest type first, then by name.

A digest is the same on ranks that hold the same bits, whatever their device and memory format: XXH3 by Yann Collet
(github.com/Cyan4973/xxHash). It depends on every bit and its position, so that no two changes cancel as they may in a sum; by chance two
states have the same one once in 2^64. It is not a defence against an attacker.
"""

import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor
from xxhash import xxh3_64_intdigest

from stagerun.base.errors import DataError, listing
from stagerun.base.weights import is_caffes, is_safetensors
from stagerun.base.wings import require_wing

Tensors = dict[str, Tensor]
Digests = dict[str, int]

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
_ORDER = {dtype: -index for index, dtype in enumerate(TYPES)}


class Packed:
    """Host memory for tensors, laid out as a .safetensors file: `tensors` are views into `data`."""

    def __init__(self, like: Tensors, pinned: bool = False) -> None:
        """Allocate memory for names, shapes and types of `like`. `pinned`: a GPU can write to it directly. KeyError for a type that is not in
        TYPES."""
        ordered = sorted(like, key=lambda name: (_ORDER[like[name].dtype], name))
        spans: dict[str, tuple[int, int]] = {}
        end = 0
        for name in ordered:
            begin, end = end, end + like[name].numel() * like[name].element_size()
            spans[name] = begin, end
        header = {
            name: {"dtype": TYPES[like[name].dtype], "shape": list(like[name].shape), "data_offsets": list(spans[name])}
            for name in ordered
        }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        # Touch the memory now: else the system allocates it page by page at the first copy, several times slower, while training waits.
        self._file = torch.empty(start + end, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._file[:start] = torch.frombuffer(bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8)
        body = self._file[start:]
        self.tensors = {
            name: body[slice(*spans[name])].view(tensor.dtype).view(tensor.shape) for name, tensor in like.items()
        }

    @property
    def data(self) -> memoryview:
        """Return the current bytes of the file; not a copy."""
        return self._file.numpy().data


def encode(tensors: Tensors) -> bytes:
    """Return the bytes of a .safetensors file."""
    packed = Packed(tensors)
    for name, tensor in tensors.items():
        packed.tensors[name].copy_(tensor)
    return bytes(packed.data)


# Bytes of names, types and shapes: of some thousands of tensors 500 kB. The format allows 100 MB, which would take gigabytes in memory.
MOST_HEADER = 4_000_000


def decode(data: bytes) -> Tensors:
    """Return the tensors of a .safetensors file; ValueError for any other. Takes memory of a small multiple of its size."""
    if int.from_bytes(data[:8], "little") > MOST_HEADER:
        raise ValueError(f"not a safetensors file of a network: its header has more than {MOST_HEADER} bytes")
    try:
        return load(data)
    # KeyError: a type that torch lacks; TypeError: a dimension beyond int64, with a zero that makes the size fit.
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"not a safetensors file that can be read: {error}") from error


def digest(tensor: Tensor) -> int:
    """Return the digest of the elements' bytes in the order of the indices, the last one fastest; by one thread."""
    host = tensor.detach().cpu()
    if host.dtype == torch.bfloat16:  # numpy lacks it
        host = host.view(torch.int16)
    return xxh3_64_intdigest(np.ascontiguousarray(host.numpy()).reshape(-1).view(np.uint8).data)


def digest_on_device(tensor: Tensor) -> int:
    """Return a digest computed on the tensor's device: `digest` on the CPU, elsewhere `mixed`, which copies one number to the host."""
    return digest(tensor) if tensor.device.type == "cpu" else mixed(tensor)


def mixed(tensor: Tensor) -> int:
    """Return the sum of all 64-bit words modulo 2^64, the same on any device. Each is mixed with its index by the finalizer of SplitMix64
    (Steele, Lea and Flood, OOPSLA 2014). The finalizer is one to one, so a change within one word always shows."""
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
    """Return int64 words from index `start` on, mixed with their indices."""
    indices = torch.arange(start + 1, start + 1 + words.numel(), device=words.device)
    x = indices.mul_(-0x61C8864680B583EB).add_(words)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


def combined(digests: Mapping[str, int]) -> int:
    """Return one digest of all digests and their names, in any order."""
    return xxh3_64_intdigest("".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests)).encode())


# What a training script wraps a state_dict in.
_AROUND = ("state_dict", "model", "model_state_dict")
_ALONE = "save `model.state_dict()` alone, or as .safetensors"


def tensors_in(data: bytes, name: str) -> Tensors:
    """Return the tensors in a file by name, on the CPU: safetensors, what `torch.save` wrote, or a .caffemodel. Nothing in it is run
    (`weights_only`). DataError if it holds no network's tensors; `name` is the file's."""
    if not is_safetensors(data[:9]) and (data[:2] == b"PK" or data[:1] == b"\x80"):
        return _of_torch(data, name)
    try:
        if is_caffes(data[:9], name):
            arrays = require_wing("caffe.binary.tensors")(data)
            # Copies: the arrays are views into the file, which torch could then write to.
            return {key: torch.from_numpy(np.array(array)) for key, array in arrays.items()}
        return decode(data)
    except ValueError as error:
        hint = "stagerun reads .safetensors, .caffemodel, and what `torch.save` wrote"
        raise DataError(f"{name}: {error}", hint) from error


# Bytes of the pickle in a zip of `torch.save`: a tensor takes about 150, and reading takes 3 s a megabyte at worst.
_MOST_PICKLED = 1 << 20


def _require_plain_zip(data: bytes, name: str) -> None:
    """Raise DataError for a zip that `torch.save` doesn't write: it unpacks to much more than its size, or holds a pickle that takes long."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, struct.error, RuntimeError) as error:
        raise DataError(f"{name} is not a whole file of `torch.save`: {error}", "copy it again") from error
    for member in members:
        limit = _MOST_PICKLED if member.filename.endswith(".pkl") else len(data)
        if member.compress_type != zipfile.ZIP_STORED or member.file_size > limit:
            raise DataError(f"{name} holds more than tensors: {member.filename} is compressed or too large", _ALONE)


def _of_torch(data: bytes, name: str) -> Tensors:
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
        if (tensors := _state_dict(candidate)) is not None:
            return tensors
    keys = [str(key) for key in list(held)[:6]] if isinstance(held, dict) else []
    hint = f"stagerun looks for a state_dict in the file itself, and under {listing(_AROUND)}; {_ALONE}"
    raise DataError(f"{name} has no state_dict: it holds {listing(keys, 'and') or type(held).__name__}", hint)


def _state_dict(held: object) -> Tensors | None:
    if not isinstance(held, dict) or not held:
        return None
    if not all(isinstance(key, str) and isinstance(value, Tensor) for key, value in held.items()):
        return None
    return {key: value.detach() for key, value in held.items()}
