"""The host: its name, and what it allows this process of processors, memory and open files, by itself and by control groups, as a job
scheduler or a container sets them.

Linux: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, scheduler/sched-bwc.rst, cgroups(7), proc(5).
"""

import math
import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

# Where version 1 mounts the controller of processor time: alone, or with the one that counts it.
_CPU_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
# The files of memory, by the version of control groups: limit, use, and the entry of memory.stat that counts pages the kernel gives
# back before it kills.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


_ROOT = Path("/")


def host_name() -> str:
    return os.uname().nodename


def open_files(wanted: int = 0) -> float:
    """How many files this process may have open at once, after its own limit was raised towards `wanted` as far as the host allows;
    infinity for no limit."""
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
    """Bytes that this process may take without swapping and without being killed: the least that the machine, its control
    group, and every group above leave free."""
    import psutil  # 15 ms, for which no command on a login node waits

    left = (_memory_left(version, folder) for version, folder in groups(root, "memory"))
    return max(0, min([psutil.virtual_memory().available, *(found for found in left if found is not None)]))


def whole_memory(root: Path = _ROOT) -> int:
    """Bytes that this process and its like may have in all, free or not: the machine's, or the least that its control group, and
    every group above, allow."""
    import psutil

    limits = (_number(folder / _MEMORY[version][0]) for version, folder in groups(root, "memory"))
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit is not None)])


def nvidia_gpus() -> list[str]:
    """The models of the GPUs that Nvidia's driver sees, in the order of their places on the bus: [] without the driver."""
    found = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [pairs(lines(file)).get("Model", "unknown") for file in found]


def pairs(text: Iterable[str]) -> dict[str, str]:
    """Lines of `name : value`, as in /proc; of several with a name the first one."""
    split = [line.partition(":") for line in text if ":" in line]
    return {name.strip(): value.strip() for name, _, value in reversed(split)}


def _memory_left(version: int, folder: Path) -> int | None:
    """None without a limit, or without a group."""
    limit_file, used_file, cache = _MEMORY[version]
    limit, used = _number(folder / limit_file), _number(folder / used_file)
    if limit is None or used is None:
        return None
    counted = dict(line.partition(" ")[::2] for line in lines(folder / "memory.stat"))
    return limit - used + int(counted.get(cache, 0))


def cpu_quota() -> float | None:
    """Processors' worth of time that this process and its like may use, the least of its groups; None: no limit. A quota of 4 on a
    machine with 96 processors lets threads run on all of them, and stops them all when 4 processors' worth is used up."""
    found = []
    for version, folder in groups(_ROOT, "cpu", _CPU_MOUNTS):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = " ".join(line for file in files for line in lines(folder / file)).split()
        # Otherwise `max`, -1, or no such group.
        if len(words) == 2 and all(map(str.isdigit, words)) and int(words[0]) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def groups(root: Path, controller: str, mounts: tuple[str, ...] = ()) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each control group that this process is in, as far as `controller` goes, and of those above. `mounts`:
    names of version 1's mount, by default the controller's. In a container the path may be that of the host, of which only the end, or
    nothing, is there: what isn't has no files."""
    top = root / "sys/fs/cgroup"
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # of version 2 there is one, mounted beside the others where both are in use
            places = [(2, top), (2, top / "unified")]
        else:
            places = [(1, top / name) for name in mounts or (controller,) if controller in controllers.split(",")]
        parts = [part for part in path.split("/") if part and part != ".."]
        for version, place in places:
            yield from ((version, place.joinpath(*parts[:n])) for n in range(len(parts), -1, -1))


def _number(file: Path) -> int | None:
    """None for `max`, and for a file that isn't there. (Version 1 shows "no limit" as a number beyond any machine's memory.)"""
    text = lines(file)
    return int(text[0]) if text and text[0].isdigit() else None


def lines(file: Path) -> list[str]:
    """Empty for a file that isn't there."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:  # another kernel, or another version of control groups: nothing can be known
        return []
