"""The facts of one host, as one value that can be sent as JSON, and what is wrong with it or differs between hosts."""

import os
import platform
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

import stagerun
from stagerun.base.errors import PermissionDenied, StorageError
from stagerun.base.recipe import Schedule
from stagerun.base.text import size
from stagerun.data.scratch.layout import PARTIAL, free_bytes, held_now, home_of, idle_now, look, missing, survey, taken
from stagerun.language import load
from stagerun.system.files import LOCAL, mounted, writing
from stagerun.system.host import lines, nvidia_gpus
from stagerun.system.image_folder import is_class_folder, small
from stagerun.system.imports import import_of, is_there
from stagerun.system.machine import processor, version
from stagerun.train.compare import Finding, Reads, names, odd_ones, other_schedules, tried, what_is_read

# The packages whose versions are compared between hosts.
_PACKAGES = ("torch", "torchvision", "numpy", "protobuf", "lmdb", "safetensors", "xxhash", "opencv-python-headless")
# What torch's own AVX512 loops need; else they are its AVX2 loops, which need AVX2 and FMA (ATen/native/DispatchStub.cpp).
_AVX512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "fma"}
_BITS = "on unlike hosts another number of workers, or another order of hosts, may give other bits"
_HINTS = dict.fromkeys(("torch", "processor", "instruction set", "processor flags"), _BITS) | {
    "cores": "all wait for the slowest; `--threads` makes them alike",
    "GPUs": "all wait for the slowest",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`machine`: what is compared, and shown, as it stands. `reads` is None where the schedule has mistakes. `output`: where it is, in words.
    `scratch_free` in bytes."""

    machine: Mapping[str, str]
    reads: Reads | None = None
    output: str = ""
    scratch_free: int | None = None
    troubles: tuple[Finding, ...] = ()


def host_facts(folder: str, overrides: Sequence[str] = (), out: str | None = None, *, writes: bool = False) -> Facts:
    """The facts of this host for the schedule in `folder`, with the changes of `--set`. No torch; nothing is left on any disk. What is
    wrong is in `troubles`; nothing is raised. `out`: `--out`. `writes`: rank 0 will be here, who writes to the output folder."""
    troubles: list[Finding] = []
    schedule = tried(troubles, lambda: load(folder, overrides))
    if schedule is None:
        return Facts(machine=_machine(), troubles=tuple(troubles))
    reads, room = what_is_read(schedule, troubles), None
    # Where an LMDB is missing, that is said once.
    if schedule.data.scratch is not None and all(one.seen for one in reads.images):
        room = tried(troubles, lambda: scratch_room(schedule))
    output = Path(out) if out is not None else Path("out") / schedule.name
    if writes:
        tried(troubles, lambda: _require_out(output))
    return Facts(
        machine=_machine(),
        reads=reads,
        output=tried(troubles, lambda: _shown(output)) or "",
        scratch_free=None if room is None else room[1],
        troubles=tuple(troubles),
    )


def _machine() -> dict[str, str]:
    model, flags = processor()
    gpus, driver = _gpus()
    versions = {"python": platform.python_version(), "stagerun": stagerun.__version__}
    versions |= {name: version(name) for name in _PACKAGES}
    return versions | {
        "processor": model,
        "instruction set": _instruction_set(flags),
        "processor flags": " ".join(flags) or "none",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none",
        "GPU driver": driver or "none",
    }


def _instruction_set(flags: Collection[str]) -> str:
    """That of torch's own loops."""
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "").upper()
    if limit:
        return f"{limit} (ATEN_CPU_CAPABILITY)"
    if _AVX512.issubset(flags):
        return "AVX512"
    return "AVX2" if {"avx2", "fma"}.issubset(flags) else "DEFAULT"


def _gpus() -> tuple[list[str], str]:
    """Names of the GPUs, and the version of the driver, as Nvidia's reports them; ([], '') without it."""
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...
    words = " ".join(lines(Path("/proc/driver/nvidia/version"))[:1]).split()
    return nvidia_gpus(), next((word for word in words if word[0].isdigit() and "." in word), "")


# -- folders


def _shown(path: Path) -> str:
    """StorageError if it can't be looked at."""
    near = _nearest(path)
    try:
        free = free_bytes(near)
    except OSError as error:
        raise StorageError(f"{path}: can't be looked at: {error.strerror}", "check the disk or the server") from None
    kind = mounted(near) or "unknown"
    return f"{path} on {kind}, {'its own' if kind in LOCAL else 'which other hosts may see, too'}, {size(free)} free"


def _require_out(path: Path) -> None:
    """StorageError, PermissionDenied if rank 0 couldn't make the output folder, or write to the one that is there."""
    near = _nearest(path)
    if not near.is_dir():
        raise StorageError(f"{near}: is a file, and no folder", "give another --out")
    if not os.access(near, os.W_OK | os.X_OK):
        raise PermissionDenied(f"may not write {path}", "give an --out that you may write to")
    if near == path.absolute():
        with writing(near, "give another --out, or make room there"), tempfile.TemporaryFile(dir=near) as file:
            file.write(b"x" * 4096)  # a block, so that a full disk shows
            file.flush()
            os.fsync(file.fileno())


def _nearest(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    near = path.absolute()
    return next((folder for folder in (near, *near.parents) if folder.exists()), near)


def scratch_room(schedule: Schedule) -> tuple[int, int, int]:
    """Bytes of the scratch disk that copies of the schedule's LMDBs still need, that are free, and that other copies take, which may go where
    no one uses them. None is taken. StorageError if these don't fit, or the folder is missing, PermissionDenied; DataError if an LMDB isn't
    there whose copy isn't whole either."""
    data = schedule.data
    assert data.scratch is not None
    home = home_of(data.scratch, make=False)
    folders = [source for source in schedule.sources if is_class_folder(source.path)]
    originals = [look(source.path) for source in schedule.sources if source not in folders]
    imports = [import_of(small(source.path), data.scratch, "") for source in folders]
    names = {original.name for original in originals} | {Path(made.lmdb).name for made in imports}
    removable = 0
    try:
        if home.is_dir():
            # Under the lock of whoever takes room, so that a job that starts does not find a copy in use that is only looked at here.
            # While another holds it nothing is counted; without a lock, there is nothing to count.
            lock = home / "lock"
            with held_now(lock) if lock.exists() else nullcontext(False) as ours:
                for one in survey(home) if ours else ():
                    if one.name not in names:
                        with idle_now(one) as idle:
                            removable += one.bytes if idle else 0
        needed = sum(missing(home, original) for original in originals)
        needed += sum(max(0, m.bytes - taken(Path(f"{m.lmdb}{PARTIAL}"))) for m in imports if not is_there(m))
        free, reserve = free_bytes(home if home.is_dir() else Path(data.scratch)), round(data.scratch_reserve * 1e9)
    except OSError as error:
        raise StorageError(f"{data.scratch}: {error.strerror}", "check the disk, or give another `scratch`") from None
    if needed and needed + reserve > free + removable:
        raise StorageError(
            f"{data.scratch}: {size(needed)} needed for copies of the images, {size(free)} free, of which {size(reserve)} stay free "
            "(scratch_reserve)",
            "free some space there, give another `scratch`, or leave it out to read the data where it is",
        )
    return needed, free, removable


# -- compared


def troubles(facts: Mapping[str, Facts]) -> list[Finding]:
    """What is wrong with a host by itself; hosts with the same trouble are one finding."""
    found: dict[Finding, list[str]] = {}
    for host, one in facts.items():
        for trouble in one.troubles:
            found.setdefault(trouble, []).append(host)

    def called(hosts: Sequence[str]) -> str:
        return f"all {len(hosts)} hosts" if 1 < len(hosts) == len(facts) else names(hosts)

    return [
        replace(trouble, hosts=tuple(hosts), text=f"{called(hosts)}: {trouble.text}")
        for trouble, hosts in found.items()
    ]


def differences(facts: Mapping[str, Facts]) -> list[Finding]:
    """What must be the same on all hosts and isn't, and what only changes bits or speed (code 0). `facts` by the name that a host is to
    be called by, in the order of ranks. A host that could not read its schedule is not compared by it."""
    found = other_schedules({host: one.reads for host, one in facts.items() if one.reads is not None})
    for what in next(iter(facts.values())).machine:
        if what != "memory":  # of which the firmware keeps some
            values = {host: one.machine.get(what, "none") for host, one in facts.items()}
            found += odd_ones(values, what, _HINTS.get(what, ""))
    return found
