"""The facts of one host, as one value that can be sent as JSON: whoever compares those of all hosts finds the odd one."""

import hashlib
import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stagerun.base.errors import DataError, PermissionDenied, StagerunError, StorageError
from stagerun.base.recipe import CODE, LABELS, SAMPLING_WEIGHT, Cache, Data, Schedule, Source, Stage
from stagerun.base.text import size
from stagerun.data.scratch.layout import PARTIAL, held_now, home_of, look, survey, taken
from stagerun.data.scratch.room import free_bytes, idle_now, missing
from stagerun.language import canonical, load
from stagerun.store.given import mean_digests
from stagerun.system import machine
from stagerun.system.files import LOCAL, mounted, writing
from stagerun.system.host import host_name, lines, meminfo
from stagerun.system.image_folder import is_class_folder, seen, small
from stagerun.system.imports import import_of, is_there
from stagerun.system.lmdb_file import Glance, glance


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder. `kind` of its file system (ext4, nfs4 ...), `source` what is mounted there, `free` in bytes for this user. Of one that
    is not there yet they are those of the nearest folder above it."""

    path: str
    there: bool
    kind: str
    source: str
    free: int

    @property
    def shared(self) -> bool:
        """Whether, by its kind, other hosts may see it, too."""
        return self.kind not in LOCAL


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchRoom:
    """Bytes of the scratch disk: that copies of the schedule's LMDBs still need, free, kept free (`scratch_reserve`), and taken by
    copies that no one uses, which make room."""

    path: str
    needed: int
    free: int
    reserve: int
    removable: int

    @property
    def short(self) -> int:
        """Bytes that are missing; 0 or less: there is room. What is there already needs none."""
        return self.needed + self.reserve - self.free - self.removable if self.needed else 0


def place(path: Path) -> Place:
    """StorageError if it can't be looked at."""
    near = _nearest(path)
    try:
        free = free_bytes(near)
    except OSError as error:
        raise StorageError(
            f"{path}: can't be looked at: {error.strerror}", "check the disk or the file server"
        ) from None
    kind, source = mounted(near)
    return Place(path=str(path), there=path.is_dir(), kind=kind or "unknown", source=source, free=free)


def require_out(path: Path) -> None:
    """StorageError, PermissionDenied if rank 0 couldn't make the output folder, or write to the one that is there."""
    near = _nearest(path)
    if not near.is_dir():
        raise StorageError(f"{near}: is a file, and no folder", "give another --out")
    if not os.access(near, os.W_OK | os.X_OK):
        raise PermissionDenied(f"may not write {path}", "give an --out that you may write to")
    if near == path.absolute():
        _probe(near, "give another --out, or make room there")


def _nearest(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    near = path.absolute()
    return next((folder for folder in (near, *near.parents) if folder.exists()), near)


def require_temporary() -> None:
    """StorageError if no folder for temporary files can be written to."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        raise StorageError("no folder for temporary files can be written to", "set TMPDIR to one that can") from None
    _probe(Path(folder), "make room there, or set TMPDIR to another folder")


def _probe(folder: Path, hint: str) -> None:
    with writing(folder, hint), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"x" * 4096)  # a block, so that a full disk shows
        file.flush()
        os.fsync(file.fileno())


def scratch_room(schedule: Schedule) -> ScratchRoom:
    """The room of `scratch`, without taking any. StorageError if the folder is missing, PermissionDenied; DataError if an LMDB isn't
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
                    if one.folder.name.removesuffix(PARTIAL) not in names:
                        with idle_now(one) as why:
                            removable += 0 if why else one.bytes
        return ScratchRoom(
            path=data.scratch,
            needed=sum(missing(home, original) for original in originals)
            + sum(max(0, m.bytes - taken(Path(f"{m.lmdb}{PARTIAL}"))) for m in imports if not is_there(m)),
            free=free_bytes(home if home.is_dir() else Path(data.scratch)),
            reserve=round(data.scratch_reserve * 1e9),
            removable=removable,
        )
    except OSError as error:
        raise StorageError(f"{data.scratch}: {error.strerror}", "check the disk, or give another `scratch`") from None


def require_room(room: ScratchRoom) -> None:
    """StorageError if the copies don't fit."""
    if room.short > 0:
        raise StorageError(
            f"{room.path}: {size(room.needed)} needed for copies of the images, {size(room.free)} free, of which "
            f"{size(room.reserve)} stay free (scratch_reserve)",
            "free some space there, give another `scratch`, or leave it out to read the data where it is",
        )


# -- facts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong on a host, whatever the others say: in words of an error, with its exit code. Only a warning where that is 0."""

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
class Facts:
    """`versions` by package, `code` digest of stagerun's modules, `memory` bytes, `cores` that this process may use.
    `settings` is a digest of all that the schedule says but its paths, `files` digests of its files by name: both empty
    where it has mistakes."""

    host: str
    versions: Mapping[str, str]
    code: str
    processor: str
    instruction_set: str
    flags: tuple[str, ...]
    cores: int
    memory: int
    gpus: tuple[str, ...]
    driver: str
    settings: str = ""
    files: Mapping[str, str]
    images: tuple[Images, ...] = ()
    scratch: ScratchRoom | None = None
    out: Place | None = None
    troubles: tuple[Trouble, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(said: Mapping[str, Any]) -> Facts:
    """What `Facts.as_json` gave, perhaps on another host. ValueError if it is something else, of another stagerun for example."""
    try:
        images = tuple(
            Images(role=i["role"], path=i["path"], seen=Glance(**i["seen"]) if i["seen"] else None)
            for i in said["images"]
        )
        return Facts(
            **{
                **said,
                "flags": tuple(said["flags"]),
                "gpus": tuple(said["gpus"]),
                "images": images,
                "scratch": ScratchRoom(**said["scratch"]) if said["scratch"] else None,
                "out": Place(**said["out"]) if said["out"] else None,
                "troubles": tuple(Trouble(**trouble) for trouble in said["troubles"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"these are not facts of a host: {error}") from None


def host_facts(
    folder: str | None, overrides: Sequence[str] = (), out: str | None = None, *, writes: bool = False
) -> Facts:
    """The facts of this host for the schedule in `folder`, with the changes of `--set`. No torch; nothing is left on any disk. What is
    wrong is in `troubles`; nothing is raised. `out`: `--out`. `writes`: rank 0 will be here, who writes to the output
    folder. `folder` None: of the machine alone."""
    model, flags, instruction_set = machine.processor(lines(machine.CPUINFO))
    gpus, driver = machine.gpus()
    troubles: list[Trouble] = []
    found = Facts(
        host=host_name(),
        versions=machine.versions(),
        code=machine.code_digest(),
        processor=model or platform.machine(),
        instruction_set=instruction_set,
        flags=flags,
        cores=len(os.sched_getaffinity(0)),
        memory=meminfo(Path("/proc/meminfo"), "MemTotal") or 0,
        gpus=gpus,
        driver=driver,
        files={},
    )
    _tried(troubles, require_temporary)
    schedule = _tried(troubles, lambda: load(folder, overrides)) if folder is not None else None
    if schedule is not None:
        found = _of_schedule(found, schedule, out, writes, troubles)
    return replace(found, troubles=tuple(troubles))


def _of_schedule(found: Facts, schedule: Schedule, out: str | None, writes: bool, troubles: list[Trouble]) -> Facts:
    data, folder = schedule.data, Path(out) if out is not None else Path("out") / schedule.name
    room = None
    images = tuple(image_facts(schedule, troubles))
    # Where an LMDB is missing, that is said once.
    if data.scratch is not None and all(one.seen for one in images):
        room = _tried(troubles, lambda: scratch_room(schedule))
        if room is not None:
            _tried(troubles, lambda: require_room(room))
    if writes:
        _tried(troubles, lambda: require_out(folder))
    return replace(
        with_settings(found, schedule), images=images, scratch=room, out=_tried(troubles, lambda: place(folder))
    )


def with_settings(found: Facts, schedule: Schedule) -> Facts:
    folder = schedule.python.folder or "."
    files = {os.path.relpath(path, folder): _short(text) for path, text in schedule.files}
    files |= {name: digest[:16] for name, digest in mean_digests(schedule).items()}
    return replace(found, settings=settings_digest(schedule), files=files)


def image_facts(schedule: Schedule, troubles: list[Trouble]) -> list[Images]:
    """The state of each LMDB; what is wrong with one goes to `troubles`."""
    trained = {source.path for source in schedule.training_sets}
    sources = [("train" if source.path in trained else "val", source) for source in schedule.sources]
    return [Images(role=r, path=s.path, seen=_tried(troubles, partial(_checked, s))) for r, s in sources]


def _glance(source: Source) -> Glance:
    """The names and sizes of the images in class folders, imported or not."""
    if not is_class_folder(source.path):
        return glance(source.path)
    listed = small(source.path)
    state = seen(listed)
    return Glance(records=len(listed.names), size=state.bytes, fingerprint=state.files, ends="")


def _checked(source: Source) -> Glance:
    found = _glance(source)
    if found.records != source.images:
        raise DataError(
            f"{source.path}: holds {found.records} records, but the schedule says images: {source.images}",
            f"write `images: {found.records}` beside its `source` in schedule.prototxt, or name the folder meant",
        )
    return found


def settings_text(schedule: Schedule) -> str:
    """All that the schedule says, but where this host has its images, and what only this host's time and room depend on. Whether there
    is a scratch folder is the same for all: they copy together."""

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
        if key.startswith(CODE) or key in (LABELS, SAMPLING_WEIGHT)
    }
    code |= {f"labels: {val.labels_digest}" for stage in schedule.stages for val in stage.data.val if val.labels_digest}
    code |= {f"mean_file {name}: {digest}" for name, digest in mean_digests(schedule).items()}
    alike = schedule.with_data(of_all)
    return "\n".join([canonical(replace(alike, stages=tuple(map(_without_place, alike.stages)))), *sorted(code)])


def _without_place(stage: Stage) -> Stage:
    """Without where this host has the weights and mean images that it names."""
    solver = stage.solver
    transform, tested = (replace(one, mean_path="") for one in (solver.transform, solver.test_transform))
    solver = replace(solver, transform=transform, test_transform=tested)
    if solver.weights is not None:
        solver = replace(solver, weights=replace(solver.weights, path=""))
    if solver.loss is not None and solver.loss.teacher_weights is not None:
        taught = replace(solver.loss.teacher_weights, path="")
        solver = replace(solver, loss=replace(solver.loss, teacher_weights=taught))
    return replace(stage, solver=solver)


def settings_digest(schedule: Schedule) -> str:
    return hashlib.sha256(settings_text(schedule).encode()).hexdigest()


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def _tried(troubles: list[Trouble], do: Callable[[], T]) -> T | None:
    """`do()`; None after a StagerunError, which goes to `troubles`."""
    try:
        return do()
    except StagerunError as error:
        text = error.render() if not error.hint else error.message
        troubles.append(Trouble(code=int(error.exit_code), text=text, hint=error.hint))
        return None
