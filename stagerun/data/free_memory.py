"""How much memory a process may take: of the machine, and of its control groups, as a job scheduler or a container sets them.

Linux: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, cgroups(7), proc(5).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stagerun.cgroups import Roots, folders, lines


@dataclass(frozen=True, slots=True)
class _Names:
    """The files of one version. `cache` is the entry of memory.stat that counts pages the kernel gives back before it kills."""

    limit: str
    used: str
    cache: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_memory(roots: Roots | None = None) -> int:
    """Bytes that this process may take without swapping and without being killed: the least that the machine, its control
    group, and every group above that leave free."""
    roots = roots or Roots()
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in lines(roots.proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return max(0, min([free, *_left(roots)]))


def whole_memory(roots: Roots | None = None) -> int:
    """Bytes that this process and its like may have in all, free or not: the machine's, or the least that its control group, and
    every group above, allow."""
    roots = roots or Roots()
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for version, folder in folders(roots, "memory"):
        limit = _number(folder / (_V2 if version == 2 else _V1).limit)
        found += [limit] if limit is not None else []
    return min(found)


def _left(roots: Roots) -> Iterator[int]:
    """What each control group that has a limit leaves free."""
    for version, folder in folders(roots, "memory"):
        left = _left_in(folder, _V2 if version == 2 else _V1)
        if left is not None:
            yield left


def _left_in(folder: Path, names: _Names) -> int | None:
    """None where there is no limit, or no group."""
    limit, used = _number(folder / names.limit), _number(folder / names.used)
    if limit is None or used is None:
        return None
    for line in lines(folder / "memory.stat"):
        name, _, value = line.partition(" ")
        if name == names.cache:
            used -= int(value)
    return limit - used


def _number(file: Path) -> int | None:
    """None for `max`, and where there is no such file. (Version 1 shows "no limit" as a number beyond any machine's memory.)"""
    text = lines(file)
    return int(text[0]) if text and text[0].isdigit() else None
