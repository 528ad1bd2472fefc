"""One machine as a job sees it. A *CPU* is what the kernel numbers: a hardware thread. A *core* is a physical one, with one CPU
or, with SMT, several."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

# More than Linux has numbers for.
_MOST_CPUS = 1 << 16


@dataclass(frozen=True, slots=True)
class Core:
    """`cpus`: its hardware threads, ascending. `slow`: one of the slower kind on a machine that has two."""

    cpus: tuple[int, ...]
    node: int
    socket: int
    slow: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node. `memory` in bytes; 0: unknown or none."""

    number: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Gpu:
    """`number` as torch counts them. `node`: the NUMA node that it is attached to; None: not told."""

    number: int
    node: int | None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """`cores` by node, then first CPU: all that are online. `allowed`: the CPUs that the affinity and cpuset of this process leave it.
    `quota`: processors' worth of time that its control groups leave it; None: no limit. `gpus` by number."""

    cores: tuple[Core, ...]
    nodes: tuple[Node, ...]
    gpus: tuple[Gpu, ...]
    allowed: frozenset[int]
    quota: float | None = None

    @property
    def usable(self) -> tuple[Core, ...]:
        """The cores that have a CPU which this process may use, with those CPUs alone."""
        left = (replace(core, cpus=tuple(c for c in core.cpus if c in self.allowed)) for core in self.cores)
        return tuple(core for core in left if core.cpus)

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus)

    @property
    def limited(self) -> bool:
        """Whether this process may use fewer CPUs than there are."""
        return not self.cpus <= self.allowed

    @property
    def short_of_time(self) -> bool:
        """Whether its quota is below what the CPUs that it may use could do."""
        return self.quota is not None and self.quota < len(self.cpus & self.allowed)

    def within(self, allowed: Iterable[int]) -> "Machine":
        """The same machine for a process that may use these CPUs."""
        return replace(self, allowed=frozenset(allowed))


def ranges(numbers: Iterable[int]) -> str:
    """`0-3,8`, as the kernel writes lists of CPUs; '' for none."""
    pieces: list[list[int]] = []
    for number in sorted(set(numbers)):
        if pieces and number == pieces[-1][-1] + 1:
            pieces[-1][1:] = [number]
        else:
            pieces.append([number])
    return ",".join("-".join(map(str, piece)) for piece in pieces)


def numbers(text: str) -> list[int]:
    """What `ranges` writes, and the kernel, in the order of the text. ValueError."""
    found: list[int] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(piece)
        if not int(first) <= int(last or first) < _MOST_CPUS or len(found) > _MOST_CPUS:
            raise ValueError(piece)
        found += range(int(first), int(last or first) + 1)
    return found
