"""The facts of one host, as one value that can be sent as JSON: whoever compares those of all hosts finds the odd one."""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stagerun.data.fingerprint import Glance, glance
from stagerun.errors import DataError, StagerunError
from stagerun.preflight import machine
from stagerun.preflight.places import (
    Place,
    ScratchRoom,
    place,
    require_room,
    require_temporary,
    require_writable,
    scratch_room,
)
from stagerun.recipe import Cache, Data, Schedule, Source
from stagerun.spec import canonical, load
from stagerun.system.host import host_name

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
        raise ValueError(f"these are no facts of a host: {error}") from None


def host_facts(
    folder: str | None, overrides: Sequence[str] = (), out: str | None = None, *, writes: bool = False
) -> Facts:
    """The facts of this host for the schedule in `folder`, with the changes of `--set`. No torch; nothing is left on any disk. Of
    what is wrong it tells (`troubles`), and raises nothing. `out`: `--out`. `writes`: rank 0 will be here, who writes to the output
    folder. `folder` None: of the machine alone."""
    model, flags, instruction_set = machine.processor(machine.read("/proc/cpuinfo"))
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
        memory=machine.memory_bytes(machine.read("/proc/meminfo")),
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
    images = tuple(image_facts(data, troubles))
    # Where an LMDB is missing, that is said once.
    if data.scratch is not None and all(one.seen for one in images):
        room = _tried(troubles, lambda: scratch_room(data))
        if room is not None:
            _tried(troubles, lambda: require_room(room))
    if writes:
        _tried(troubles, lambda: require_writable(folder))
    return replace(
        with_settings(found, schedule), images=images, scratch=room, out=_tried(troubles, lambda: place(folder))
    )


def with_settings(found: Facts, schedule: Schedule) -> Facts:
    files = {os.path.basename(path): _short(text) for path, text in schedule.files}
    return replace(found, settings=settings_digest(schedule), files=files)


def image_facts(data: Data, troubles: list[Trouble]) -> list[Images]:
    """Of each LMDB; what is wrong with one goes to `troubles`."""
    sources = [("train", data.train), *([("val", data.val)] if data.val else [])]
    return [Images(role=r, path=s.path, seen=_tried(troubles, partial(_checked, s))) for r, s in sources]


def _checked(source: Source) -> Glance:
    found = glance(source.path)
    if found.records != source.images:
        raise DataError(
            f"{source.path}: holds {found.records} records, but the schedule says images: {source.images}",
            f"write `images: {found.records}` beside its `source` in schedule.prototxt, or name the folder meant",
        )
    return found


def settings_text(schedule: Schedule) -> str:
    """All that the schedule says, but where this host has its images, and what only this host's time and room depend on. Whether there
    is a scratch folder is the same for all: they copy together."""
    data = schedule.data
    mine = replace(
        data,
        train=replace(data.train, path=""),
        val=replace(data.val, path="") if data.val else None,
        scratch=None if data.scratch is None else "",
        scratch_reserve=0.0,
        loader_threads=None,
        cache=Cache.AUTO,
    )
    return canonical(replace(schedule, data=mine))


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
