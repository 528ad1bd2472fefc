"""The facts of one host, as one value that can be sent as JSON: whoever compares those of all hosts finds the odd one."""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from stagerun.base.errors import DataError, PermissionDenied, StagerunError, StorageError
from stagerun.base.recipe import CODE, LABELS, Cache, Data, Schedule, Source, Stage
from stagerun.base.text import size
from stagerun.data.scratch.layout import PARTIAL, free_bytes, held_now, home_of, idle_now, look, missing, survey, taken
from stagerun.language import canonical, load
from stagerun.store.given import mean_digests
from stagerun.system import machine
from stagerun.system.files import LOCAL, mounted, writing
from stagerun.system.host import lines, meminfo
from stagerun.system.image_folder import is_class_folder, seen, small
from stagerun.system.imports import import_of, is_there
from stagerun.system.lmdb_file import Glance, glance

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong on a host, whatever the others say: in words of an error, with its exit code."""

    code: int
    text: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """An LMDB of the schedule. `seen` is None where it isn't there, or can't be used (then there is a Trouble)."""

    role: str  # "train" or "val"
    path: str
    seen: Glance | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What a host reads of a schedule: `settings` is a digest of all that it says but its paths, `files` digests of its files by name."""

    settings: str
    files: Mapping[str, str]
    images: tuple[Images, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """`machine`: what is compared, and shown, as it stands. `reads` is None where the schedule has mistakes. `output`: where it is, in words.
    `scratch_free` in bytes."""

    machine: Mapping[str, str]
    reads: Reads | None = None
    output: str = ""
    scratch_free: int | None = None
    troubles: tuple[Trouble, ...] = ()


def host_facts(folder: str, overrides: Sequence[str] = (), out: str | None = None, *, writes: bool = False) -> Facts:
    """The facts of this host for the schedule in `folder`, with the changes of `--set`. No torch; nothing is left on any disk. What is
    wrong is in `troubles`; nothing is raised. `out`: `--out`. `writes`: rank 0 will be here, who writes to the output folder."""
    troubles: list[Trouble] = []
    schedule = _tried(troubles, lambda: load(folder, overrides))
    if schedule is None:
        return Facts(machine=_machine(), troubles=tuple(troubles))
    reads, room = what_is_read(schedule, troubles), None
    # Where an LMDB is missing, that is said once.
    if schedule.data.scratch is not None and all(one.seen for one in reads.images):
        room = _tried(troubles, lambda: scratch_room(schedule))
    output = Path(out) if out is not None else Path("out") / schedule.name
    if writes:
        _tried(troubles, lambda: _require_out(output))
    return Facts(
        machine=_machine(),
        reads=reads,
        output=_tried(troubles, lambda: _shown(output)) or "",
        scratch_free=None if room is None else room[1],
        troubles=tuple(troubles),
    )


def _machine() -> dict[str, str]:
    model, flags, instruction_set = machine.processor(lines(machine.CPUINFO))
    gpus, driver = machine.gpus()
    return machine.versions() | {
        "processor": model or platform.machine(),
        "instruction set": instruction_set,
        "processor flags": " ".join(flags) or "none",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{(meminfo(Path('/proc/meminfo'), 'MemTotal') or 0) / 1e9:.0f} GB",
        "GPUs": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "none",
        "GPU driver": driver or "none",
    }


# -- folders


def _shown(path: Path) -> str:
    """StorageError if it can't be looked at."""
    near = _nearest(path)
    try:
        free = free_bytes(near)
    except OSError as error:
        raise StorageError(f"{path}: can't be looked at: {error.strerror}", "check the disk or the server") from None
    kind = mounted(near)[0] or "unknown"
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


# -- the schedule


def what_is_read(schedule: Schedule, troubles: list[Trouble], images: bool = True) -> Reads:
    """With the state of each LMDB where `images` are asked for; what is wrong with one goes to `troubles`."""
    folder = schedule.python.folder or "."
    files = {
        os.path.relpath(path, folder): hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
        for path, text in schedule.files
    }
    files |= {name: digest[:16] for name, digest in mean_digests(schedule).items()}
    trained = {source.path for source in schedule.training_sets}
    found = [
        Images(
            role="train" if source.path in trained else "val",
            path=source.path,
            seen=_tried(troubles, partial(_glance, source)),
        )
        for source in (schedule.sources if images else ())
    ]
    return Reads(settings=settings_digest(schedule), files=files, images=tuple(found))


def _glance(source: Source) -> Glance:
    """Of images in class folders, imported or not, by their names and sizes. DataError."""
    if is_class_folder(source.path):
        listed = small(source.path)
        state = seen(listed)
        found = Glance(records=len(listed.names), size=state.bytes, fingerprint=state.files, ends="")
    else:
        found = glance(source.path)
    if found.records != source.images:
        raise DataError(
            f"{source.path}: holds {found.records} records, but the schedule says images: {source.images}",
            f"write `images: {found.records}` beside its `source` in schedule.prototxt, or name the folder meant",
        )
    return found


def settings_digest(schedule: Schedule) -> str:
    """Of all that the schedule says, but where this host has its files, and what only this host's time and room depend on. Whether there is a
    scratch folder is the same for all: they copy together."""

    def of_all(data: Data) -> Data:
        return replace(
            data,
            train=replace(data.train, path="", labels_path=None),
            val=tuple(replace(source, path="", labels_path=None) for source in data.val),
            scratch=None if data.scratch is None else "",
            scratch_reserve=0.0,
            loader_threads=None,
            cache=Cache.AUTO,
        )

    code = {
        f"{key}: {text}"
        for stage in schedule.stages
        for key, text in stage.identity.items()
        if key.startswith(CODE) or key == LABELS
    }
    code |= {f"labels: {val.labels_digest}" for stage in schedule.stages for val in stage.data.val if val.labels_digest}
    code |= {f"mean_file {name}: {digest}" for name, digest in mean_digests(schedule).items()}
    alike = schedule.with_data(of_all)
    text = "\n".join([canonical(replace(alike, stages=tuple(map(_without_place, alike.stages)))), *sorted(code)])
    return hashlib.sha256(text.encode()).hexdigest()


def _without_place(stage: Stage) -> Stage:
    """Without where this host has the weights and mean images that it names."""
    solver = stage.solver
    transform, tested = (replace(one, mean_path="") for one in (solver.transform, solver.test_transform))
    solver = replace(solver, transform=transform, test_transform=tested)
    if solver.weights is not None:
        solver = replace(solver, weights=replace(solver.weights, path=""))
    return replace(stage, solver=solver)


def _tried(troubles: list[Trouble], do: Callable[[], T]) -> T | None:
    """`do()`; None after a StagerunError, which goes to `troubles`."""
    try:
        return do()
    except StagerunError as error:
        text = error.render() if not error.hint else error.message
        troubles.append(Trouble(code=int(error.exit_code), text=text, hint=error.hint))
        return None
