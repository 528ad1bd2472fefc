"""What this machine computes with, and which versions it has: torch need not be imported."""

import functools
import hashlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

import stagerun
from stagerun.system.host import lines, pairs

# The flags of a processor that change which code torch, MKL and oneDNN take, and so speed and last bits.
_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx_ifma", "avx10_1", "avx10_2"),
    *("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex"),
    *("asimd", "asimdhp", "asimddp", "fphp", "sve", "sve2", "svebf16", "svei8mm", "bf16", "i8mm", "sme"),
)


def version(name: str) -> str:
    """Of a package, from its metadata; `none` where it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def code_digest() -> str:
    """sha256, in hex, over the names and bytes of stagerun's own modules: two hosts with one version may have different code."""
    root = Path(stagerun.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def processor() -> tuple[str, tuple[str, ...]]:
    """The first one's model, and which of _FLAGS it has."""
    said = _cpuinfo()
    flags = set(said.get("flags", said.get("Features", "")).split())
    return said.get("model name") or said.get("Hardware") or platform.machine(), tuple(f for f in _FLAGS if f in flags)


def _cpuinfo() -> dict[str, str]:
    return pairs(lines(Path("/proc/cpuinfo")))


def arithmetic() -> dict[str, str]:
    """What torch's libraries choose their kernels by: the processor and its flags, and the environment variables that steer them; one that
    can't be read is "unknown". MKL looks at vendor and model, too."""
    said, (model, flags) = _cpuinfo(), processor()
    names = (("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part"))
    number = "/".join(next((said[name] for name in pair if name in said), "?") for pair in names)
    return {
        "processor": f"{model} ({number})" if said else "unknown",
        "processor flags": (" ".join(flags) or "none") if said else "unknown",
        "math settings": " ".join(f"{n}={v!r}" for n, v in sorted(os.environ.items()) if _steers(n)) or "none",
    }


def _steers(name: str) -> bool:
    """Whether an environment variable may change bits. What oneDNN is held to is part of `instruction set`, numbers of threads are
    `threads`; where these run and what is printed changes none."""
    if name.startswith(("MKL_", "ONEDNN_", "DNNL_")):
        return not re.search("_VERBOSE|MKL_NUM_THREADS|_MAX_CPU_ISA|_JIT_|_CACHE_CAPACITY", name)
    return name in ("OMP_DYNAMIC", "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED")
