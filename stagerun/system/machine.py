"""What this machine is and has installed, read from /proc and from package metadata: torch need not be imported."""

import functools
import hashlib
import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import stagerun
from stagerun.system.host import lines, nvidia_gpus, pairs

# The packages whose versions are compared between hosts.
PACKAGES = ("torch", "torchvision", "numpy", "protobuf", "lmdb", "safetensors", "xxhash", "opencv-python-headless")
# The flags of a processor that change which code torch, MKL and oneDNN take, and so speed and last bits.
_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx_ifma", "avx10_1", "avx10_2"),
    *("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex"),
    *("asimd", "asimdhp", "asimddp", "fphp", "sve", "sve2", "svebf16", "svei8mm", "bf16", "i8mm", "sme"),
)
# What torch's own AVX512 loops need; else they are its AVX2 loops, which need AVX2 and FMA (ATen/native/DispatchStub.cpp).
_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}

# What the kernel says of each processor.
CPUINFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """The versions of Python, stagerun and PACKAGES, from their metadata; `none` for one that isn't installed."""
    found = {"python": platform.python_version(), "stagerun": stagerun.__version__}
    return found | {name: version(name) for name in PACKAGES}


def version(name: str) -> str:
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


def processor(text: Iterable[str]) -> tuple[str, tuple[str, ...], str]:
    """(model, flags that matter, instruction set of torch's own loops) of /proc/cpuinfo's lines."""
    said = pairs(text)  # of the first processor
    flags = set(said.get("flags", said.get("Features", "")).split())
    model = said.get("model name") or said.get("Hardware") or platform.machine()
    if flags >= _AVX512:
        best = "AVX512"
    elif {"avx2", "fma"} <= flags:
        best = "AVX2"
    else:
        best = "DEFAULT"
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "").upper()
    return model, tuple(f for f in _FLAGS if f in flags), f"{limit} (ATEN_CPU_CAPABILITY)" if limit else best


def arithmetic() -> dict[str, str]:
    """What torch's libraries choose their kernels by: the processor and its flags, and the environment variables that steer them; one that
    can't be read is "unknown". MKL looks at vendor and model, too."""
    text = lines(CPUINFO)
    said = pairs(text)
    model, flags, _ = processor(text)
    names = (("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part"))
    number = "/".join(next((said[name] for name in pair if name in said), "?") for pair in names)
    return {
        "processor": f"{model} ({number})" if text else "unknown",
        "processor flags": (" ".join(flags) or "none") if text else "unknown",
        "math settings": " ".join(f"{n}={v!r}" for n, v in sorted(os.environ.items()) if _steers(n)) or "none",
    }


def _steers(name: str) -> bool:
    """Whether an environment variable may change bits. What oneDNN is held to is part of `instruction set`, numbers of threads are
    `threads`; where these run and what is printed changes none."""
    if name.startswith(("MKL_", "ONEDNN_", "DNNL_")):
        return not re.search("_VERBOSE|MKL_NUM_THREADS|_MAX_CPU_ISA|_JIT_|_CACHE_CAPACITY", name)
    return name in ("OMP_DYNAMIC", "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED")


def gpus() -> tuple[tuple[str, ...], str]:
    """(names of the GPUs, version of the driver) as Nvidia's driver reports them; ((), '') without it."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...
    words = " ".join(lines(Path("/proc/driver/nvidia/version"))[:1]).split()
    return tuple(nvidia_gpus()), next((word for word in words if word[0].isdigit() and "." in word), "")
