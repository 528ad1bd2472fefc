"""The control groups that this process is in, as a job scheduler or a container sets them, and how many processors they allow.

Linux: Documentation/admin-guide/cgroup-v2.rst, scheduler/sched-bwc.rst, cgroups(7).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Where version 1 mounts the controller of processor time: alone, or with the one that counts it.
_CPU_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel shows itself."""

    proc: Path = Path("/proc")
    cgroup: Path = Path("/sys/fs/cgroup")


def folders(roots: Roots, controller: str, mounts: tuple[str, ...] = ()) -> Iterator[tuple[int, Path]]:
    """(version, folder) of each group that this process is in, as far as `controller` goes, and of those above. `mounts`: names
    of version 1's mount, by default the controller's. Not all of them need to be there."""
    for line in lines(roots.proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # of version 2 there is one, mounted beside the others where both are in use
            for mount in (roots.cgroup, roots.cgroup / "unified"):
                yield from ((2, folder) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            for name in mounts or (controller,):
                yield from ((1, folder) for folder in _upwards(roots.cgroup / name, path))


def cpu_quota(roots: Roots | None = None) -> float | None:
    """Processors' worth of time that this process and its like may use, the least of its groups; None: no limit. A quota of 4 on a
    machine with 96 processors lets threads run on all of them, and stops them all when 4 processors' worth is used up."""
    found = [q for version, folder in folders(roots or Roots(), "cpu", _CPU_MOUNTS) if (q := _quota(version, folder))]
    return min(found, default=None)


def evenly(processors: int, quota: float | None, workers: int) -> int:
    """Processors for each of `workers`, no more than the quota pays for; at least 1."""
    return max(1, (processors if quota is None else min(processors, int(quota))) // workers)


def _quota(version: int, folder: Path) -> float | None:
    if version == 2:
        words = " ".join(lines(folder / "cpu.max")).split()
    else:
        words = [*lines(folder / "cpu.cfs_quota_us"), *lines(folder / "cpu.cfs_period_us")]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])
    return None  # `max`, -1, or no such group


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above, down to the mount.

    In a container the path may be that of the host, of which only the end, or nothing, is there: what isn't has no files.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for n in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:n])


def lines(file: Path) -> list[str]:
    """No line where there is no such file."""
    try:
        return file.read_text().splitlines()
    except OSError:  # another kernel, or another version of control groups: there is nothing to know
        return []
