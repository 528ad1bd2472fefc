"""What this machine is and has installed, read from /proc and from package metadata: torch need not be imported."""

import functools
import hashlib
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import stagerun

# The packages whose version is told, and compared between hosts.
PACKAGES = ("torch", "torchvision", "numpy", "protobuf", "lmdb", "safetensors", "opencv-python-headless")
# Of a processor's flags those that change which code torch and oneDNN take, and so speed and last bits.
_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
# What torch's own AVX512 loops need; else they are its AVX2 loops, which need AVX2 and FMA (ATen/native/DispatchStub.cpp).
_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}


def versions() -> dict[str, str]:
    """Of Python, stagerun and PACKAGES, as their metadata states them; `none` for one that isn't installed."""
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


def processor(text: str) -> tuple[str, tuple[str, ...], str]:
    """(model, flags that matter, instruction set of torch's own loops) of /proc/cpuinfo's text."""
    said = dict(reversed([_pair(line) for line in text.splitlines() if ":" in line]))  # of the first processor
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


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def memory_bytes(text: str) -> int:
    """MemTotal of /proc/meminfo's text; 0 where it doesn't say."""
    for line in text.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def gpus(root: Path = Path("/proc/driver/nvidia")) -> tuple[tuple[str, ...], str]:
    """(names of the GPUs, version of the driver) as Nvidia's driver tells them; ((), '') without it."""
    names = []
    for file in sorted(root.glob("gpus/*/information")):
        said = dict(_pair(line) for line in read(file).splitlines() if ":" in line)
        names.append(said.get("Model", "unknown"))
    first = read(root / "version").partition("\n")[0]
    return tuple(names), _driver(first.split())


def _driver(words: Iterable[str]) -> str:
    """`550.54.15` of `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...`."""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def read(path: Path | str) -> str:
    """A file of /proc; '' where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
