"""One machine as a job sees it, and as Linux shows it in /sys and /proc. A *CPU* is what the kernel numbers: a hardware
thread. A *core* is a physical one, with one CPU or, with SMT, several.

Documentation/ABI/stable/sysfs-devices-node, ABI/stable/sysfs-devices-system-cpu; proc(5), cpuset(7).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stagerun.system.host import Roots, cpu_quota, lines, meminfo, nvidia_gpus

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
    """`number` as torch counts them. `node`: the NUMA node that it is attached to; None: not reported."""

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


# -- as Linux shows it


def read(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Machine:
    """The machine and this process, as /sys and /proc under `root` show them. `environment`: where CUDA_VISIBLE_DEVICES is
    looked for. What isn't reported is taken to be simple: no SMT, one socket, one node."""
    system = root / "sys/devices/system"
    online = _list(system / "cpu/online")
    allowed = _allowed(root) or online
    online = online or allowed
    node_of, nodes = _nodes(system / "node")
    slow = _slow(root, online)
    found: dict[tuple[int, ...], Core] = {}
    for cpu in online:
        folder = system / f"cpu/cpu{cpu}/topology"
        siblings = _list(folder / "thread_siblings_list") or _list(folder / "core_cpus_list") or [cpu]
        cpus = tuple(sorted(set(siblings) & set(online))) or (cpu,)
        socket = _number(folder / "physical_package_id")
        found.setdefault(cpus, Core(cpus, node_of.get(cpu, 0), max(0, socket or 0), cpu in slow))
    cores = tuple(sorted(found.values(), key=lambda core: (core.node, core.cpus)))
    used = {core.node for core in cores}
    return Machine(
        cores=cores,
        nodes=tuple(node for node in nodes if node.number in used) or tuple(Node(n) for n in sorted(used)),
        gpus=_visible(_gpus(root), (environment or {}).get("CUDA_VISIBLE_DEVICES")),
        allowed=frozenset(allowed),
        quota=cpu_quota(Roots(root / "proc", root / "sys/fs/cgroup")),
    )


def _allowed(root: Path) -> list[int]:
    """CPUs of this thread: the kernel has put affinity and cpuset together."""
    for line in lines(root / "proc/thread-self/status") or lines(root / "proc/self/status"):
        name, _, value = line.partition(":")
        if name == "Cpus_allowed_list":
            return numbers(value.strip())
    return []


def _nodes(folder: Path) -> tuple[dict[int, int], list[Node]]:
    """The node of each CPU; the nodes, among them those that have memory alone."""
    node_of: dict[int, int] = {}
    nodes = []
    for number in _list(folder / "online"):
        node_of |= dict.fromkeys(_list(folder / f"node{number}/cpulist"), number)
        nodes.append(Node(number, meminfo(folder / f"node{number}/meminfo", "MemTotal") or 0))
    return node_of, nodes


def _slow(root: Path, online: Sequence[int]) -> set[int]:
    """CPUs of the slower kind: Intel's efficient cores are a device of their own for counters, elsewhere there are capacities. Empty
    if all are alike."""
    atom = set(_list(root / "sys/devices/cpu_atom/cpus"))
    if atom:
        return atom if atom < set(online) else set()
    files = {cpu: root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity" for cpu in online}
    known = {cpu: value for cpu, file in files.items() if (value := _number(file)) is not None}
    # Favoured cores of one kind differ by some hundredths.
    return {cpu for cpu, value in known.items() if value < 0.85 * max(known.values())}


def _gpus(root: Path) -> Iterator[tuple[str, Gpu]]:
    """(UUID, GPU) in the order of their places on the bus, from Nvidia's driver."""
    for number, (place, facts) in enumerate(nvidia_gpus(root / "proc")):
        node = _number(root / "sys/bus/pci/devices" / place.lower() / "numa_node")
        # The kernel writes -1 where the firmware doesn't say, as in most virtual machines.
        node = node if node is not None and node >= 0 else None
        yield facts.get("GPU UUID", ""), Gpu(number, node, facts.get("Model", ""))


def _visible(found: Iterator[tuple[str, Gpu]], chosen: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES names, renumbered, by index or (the beginning of a) UUID. As CUDA does, it ends at the first word
    that names none; a word for a part of a GPU (MIG) names one whose node is unknown."""
    every = list(found)
    if chosen is None:
        return tuple(gpu for _, gpu in every)
    gpus: list[Gpu] = []
    for word in (w.strip() for w in chosen.split(",")):
        these = [g for uuid, g in every if word == str(g.number) or (word.startswith("GPU-") and uuid.startswith(word))]
        if these:
            gpus.append(Gpu(len(gpus), these[0].node, these[0].name))
        elif word.startswith("MIG-") and every:
            gpus.append(Gpu(len(gpus), None, "a part of a GPU"))
        else:
            break
    return tuple(gpus)


def _list(file: Path) -> list[int]:
    text = lines(file)
    return numbers(text[0]) if text else []


def _number(file: Path) -> int | None:
    text = lines(file)
    try:
        return int(text[0]) if text else None
    except ValueError:
        return None
