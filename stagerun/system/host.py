"""The host: its name, and what it allows this process of processors, memory and open files, by itself and by control groups, as a job
scheduler or a container sets them.

Linux: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, scheduler/sched-bwc.rst, cgroups(7), proc(5).
"""

import math
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Where version 1 mounts the controller of processor time: alone, or with the one that counts it.
_CPU_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")
# The files of memory, by the version of control groups: limit, use, and the entry of memory.stat that counts pages the kernel gives
# back before it kills.
_MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel shows itself."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


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


def available_memory(roots: Roots | None = None) -> int:
    """Bytes that this process may take without swapping and without being killed: the least that the machine, its control
    group, and every group above leave free."""
    roots = roots or Roots()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = meminfo(roots.proc / "meminfo", "MemAvailable")
    free = free if available is None else available
    left = (_memory_left(version, folder) for version, folder in groups(roots, "memory"))
    return max(0, min([free, *(found for found in left if found is not None)]))


def whole_memory(roots: Roots | None = None) -> int:
    """Bytes that this process and its like may have in all, free or not: the machine's, or the least that its control group, and
    every group above, allow."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_number(folder / _MEMORY[version][0]) for version, folder in groups(roots or Roots(), "memory"))
    return min([machine, *(limit for limit in limits if limit is not None)])


def meminfo(file: Path, name: str) -> int | None:
    """Bytes of an entry of /proc/meminfo, or of a NUMA node's: `MemTotal:  97511432 kB`, `Node 0 MemTotal:  97511432 kB`. None if the file
    doesn't have it."""
    for line in lines(file):
        label, _, value = line.partition(":")
        if label.split()[-1:] == [name]:
            return int(value.split()[0]) * 1024
    return None


def nvidia_gpus(proc: Path) -> list[tuple[str, dict[str, str]]]:
    """(place on the bus, what Nvidia's driver says) for each GPU, in the order of their places: [] without the driver."""
    folder = proc / "driver/nvidia/gpus"
    try:
        places = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [(place, pairs(lines(folder / place / "information"))) for place in places]


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
    for line in lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == cache:
            used -= int(value)
    return limit - used


def cpu_quota(roots: Roots | None = None) -> float | None:
    """Processors' worth of time that this process and its like may use, the least of its groups; None: no limit. A quota of 4 on a
    machine with 96 processors lets threads run on all of them, and stops them all when 4 processors' worth is used up."""
    found = [q for version, folder in groups(roots or Roots(), "cpu", _CPU_MOUNTS) if (q := _quota(version, folder))]
    return min(found, default=None)


def _quota(version: int, folder: Path) -> float | None:
    if version == 2:
        words = " ".join(lines(folder / "cpu.max")).split()
    else:
        words = [*lines(folder / "cpu.cfs_quota_us"), *lines(folder / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None  # `max`, -1, or no such group


def evenly(processors: int, quota: float | None, workers: int) -> int:
    """Processors for each of `workers`, no more than the quota pays for; at least 1."""
    return max(1, (processors if quota is None else min(processors, int(quota))) // workers)


def groups(roots: Roots, controller: str, mounts: tuple[str, ...] = ()) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each control group that this process is in, as far as `controller` goes, and of those above. `mounts`:
    names of version 1's mount, by default the controller's. Not all of them need to be there."""
    for line in lines(roots.proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # of version 2 there is one, mounted beside the others where both are in use
            for mount in (roots.cgroup, roots.cgroup / "unified"):
                yield from ((2, folder) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            for name in mounts or (controller,):
                yield from ((1, folder) for folder in _upwards(roots.cgroup / name, path))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above, down to the mount.

    In a container the path may be that of the host, of which only the end, or nothing, is there: what isn't has no files.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for n in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:n])


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
