"""The host: its name, its processor and cores, package versions, and this process's limits on processors, memory and open files, also by
control groups of a job scheduler or container. Imports no torch.

Linux: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, scheduler/sched-bwc.rst, cgroups(7), proc(5).
"""

import functools
import hashlib
import math
import os
import platform
import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import stagerun
from stagerun.base.errors import UsageError
from stagerun.base.text import count

# Mount points of version 1's controller of processor time, alone or with its accounting.
_CPU_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
# Files of memory, by version of control groups: limit, use, and the entry of memory.stat that counts reclaimable pages.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


_ROOT = Path("/")


def host_name() -> str:
    return os.uname().nodename


def open_files(wanted: int = 0) -> float:
    """Raise the limit on open files towards `wanted` as far as the host allows; return it, or infinity."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if raised <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    except (OSError, ValueError):  # a sandbox
        return soft
    return raised


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that this process may take without swapping or being killed: the least that the machine and its control groups leave
    free."""
    import psutil  # takes 15 ms

    left = (_memory_left(version, folder) for version, folder in groups(root, "memory"))
    return max(0, min([psutil.virtual_memory().available, *(size for size in left if size is not None)]))


def whole_memory(root: Path = _ROOT) -> int:
    """Return the total memory of the machine, or the least limit of this process's control groups."""
    import psutil

    limits = (_number(folder / _MEMORY[version][0]) for version, folder in groups(root, "memory"))
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def nvidia_gpus() -> list[str]:
    """Return the models of the GPUs of Nvidia's driver, in the order of the bus; [] without the driver."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [pairs(lines(file)).get("Model", "unknown") for file in files]


def pairs(text: Iterable[str]) -> dict[str, str]:
    """Parse lines of `name : value`, as in /proc; the first of a repeated name counts."""
    split = [line.partition(":") for line in text if ":" in line]
    return {name.strip(): value.strip() for name, _, value in reversed(split)}


def _memory_left(version: int, folder: Path) -> int | None:
    """Return the bytes left in a control group; None without a limit, or without a group."""
    limit_file, used_file, cache = _MEMORY[version]
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or used is None:
        return None
    counted = dict(line.partition(" ")[::2] for line in lines(folder / "memory.stat"))
    return limit - used + int(counted.get(cache, 0))


def cpu_quota() -> float | None:
    """Return the least quota of processor time, in processors, of this process's control groups; None without one. A quota of 4 on 96
    processors lets threads run on all of them, and stops them all when the time of 4 is used up."""
    quotas = []
    for version, folder in groups(_ROOT, "cpu", _CPU_MOUNTS):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(line for file in files for line in lines(folder / file)).split()
        # Otherwise `max`, -1, or no such group.
        if len(words) == 2 and all(map(str.isdigit, words)) and int(words[0]) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def groups(root: Path, controller: str, mounts: tuple[str, ...] = ()) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of this process's control groups for `controller`, and of the groups above. `mounts`: names of version 1's
    mount, by default the controller's. In a container the path may be the host's, and a folder may be missing."""
    top = root / "sys/fs/cgroup"
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2 has one hierarchy, mounted among version 1's if both are in use
            roots = [(2, top), (2, top / "unified")]
        else:
            roots = [(1, top / name) for name in mounts or (controller,) if controller in controllers.split(",")]
        parts = [part for part in path.split("/") if part and part != ".."]
        for version, root_folder in roots:
            yield from ((version, root_folder.joinpath(*parts[:n])) for n in range(len(parts), -1, -1))


def _number(file: Path) -> int | None:
    """Return the number in a file; None for `max` or a missing file. (Version 1's "no limit" is a number beyond any machine's memory.)"""
    text = lines(file)
    return int(text[0]) if text and text[0].isdigit() else None


def lines(file: Path) -> list[str]:
    """Return the lines of a file; [] for a missing one."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:  # another kernel, or another version of control groups
        return []


# Flags of a processor that select code of torch, MKL and oneDNN, and so speed and last bits.
_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx_ifma", "avx10_1", "avx10_2"),
    *("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex"),
    *("asimd", "asimdhp", "asimddp", "fphp", "sve", "sve2", "svebf16", "svei8mm", "bf16", "i8mm", "sme"),
)


def version(name: str) -> str:
    """Return the version of a package, or `none`."""
    from importlib import metadata  # takes 10 ms

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


@functools.cache
def code_digest() -> str:
    """Return the sha256, in hex, over names and bytes of stagerun's modules: hosts with the same version may have different code."""
    root = Path(stagerun.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def arithmetic() -> dict[str, str]:
    """Return what selects the kernels of torch's libraries: the processor (for MKL with vendor and model), its flags, and environment variables;
    "unknown" if unreadable."""
    info = pairs(lines(Path("/proc/cpuinfo")))  # the first processor counts
    model = info.get("model name") or info.get("Hardware") or platform.machine()
    all_flags = info.get("flags", info.get("Features", "")).split()
    flags = [flag for flag in _FLAGS if flag in all_flags]
    names = (("vendor_id", "CPU implementer"), ("cpu family", "CPU architecture"), ("model", "CPU part"))
    number = "/".join(next((info[name] for name in pair if name in info), "?") for pair in names)
    return {
        "processor": f"{model} ({number})" if info else "unknown",
        "processor flags": (" ".join(flags) or "none") if info else "unknown",
        "math settings": " ".join(f"{n}={v!r}" for n, v in sorted(os.environ.items()) if _steers(n)) or "none",
    }


def _steers(name: str) -> bool:
    """Return whether an environment variable may change bits. oneDNN's instruction set and numbers of threads are compared elsewhere;
    placement and verbosity change none."""
    if name.startswith(("MKL_", "ONEDNN_", "DNNL_")):
        return not re.search("_VERBOSE|MKL_NUM_THREADS|_MAX_CPU_ISA|_JIT_|_CACHE_CAPACITY", name)
    return name in ("OMP_DYNAMIC", "OMP_SCHEDULE", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED")


Core = tuple[int, ...]  # the CPUs (hardware threads) of one physical core, ascending


def nodes(allowed: frozenset[int], root: Path = Path("/")) -> dict[int, list[Core]]:
    """Return the cores of each NUMA node that have a CPU of `allowed`, with those CPUs alone. One node where /sys shows none."""
    system = root / "sys/devices/system"
    node_of = {
        cpu: node for node in _list(system / "node/online") for cpu in _list(system / f"node/node{node}/cpulist")
    }
    cores_of: dict[int, set[Core]] = {}
    for cpu in allowed:
        siblings = _list(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") or [cpu]
        core = tuple(sorted(allowed.intersection(siblings) | {cpu}))
        cores_of.setdefault(node_of.get(cpu, 0), set()).add(core)
    return {node: sorted(cores) for node, cores in sorted(cores_of.items())}


def shares(nodes: Mapping[int, Sequence[Core]], workers: int) -> list[tuple[int, list[int]]]:
    """Return the node and the CPUs of each worker: workers are assigned to the nodes in order, and share a node's cores evenly.

    UsageError where a worker would get no core.

    >>> shares({0: [(0, 4), (1, 5)], 1: [(2, 6), (3, 7)]}, 2)
    [(0, [0, 1, 4, 5]), (1, [2, 3, 6, 7])]
    >>> shares({0: [(0,), (1,), (2,)]}, 2)
    [(0, [0]), (0, [1, 2])]
    """
    dealt: list[tuple[int, list[int]]] = []
    for number, (node, cores) in enumerate(nodes.items()):
        its = sum(worker * len(nodes) // workers == number for worker in range(workers))
        if len(cores) < its:
            raise UsageError(
                f"--bind numa: {its} workers for the {count(len(cores), 'core')} of NUMA node {node}",
                "take fewer workers, or --bind none",
            )
        for index in range(its):
            part = cores[index * len(cores) // its : (index + 1) * len(cores) // its]
            dealt.append((node, sorted(cpu for core in part for cpu in core)))
    return dealt


def bind(cpus: Sequence[int], pid: int | None = None) -> None:
    """Bind every thread of a process (default: this one), and their children, to these CPUs. OSError if the kernel refuses."""
    for task in os.listdir(f"/proc/{pid or 'self'}/task"):
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task), cpus)


def default_workers(most: int | None = None) -> int:
    """Return the workers that a machine without GPUs has by default: one per NUMA node with at least half as many usable cores as
    the largest, no more than `most`; 1 where a quota is the limit."""
    allowed = frozenset(os.sched_getaffinity(0))
    quota = cpu_quota()
    if quota is not None and quota < len(allowed):
        return 1
    sizes = [len(cores) for cores in nodes(allowed).values()]
    large = sum(2 * size >= max(sizes) for size in sizes)
    return max(1, large if most is None else min(large, most))


def _list(file: Path) -> list[int]:
    """Return the numbers of a kernel's list such as `0-3,8`; [] for a missing file."""
    numbers: list[int] = []
    for piece in (lines(file) or [""])[0].split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers
