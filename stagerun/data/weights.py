"""Weights that a stage starts with (`recipe.Weights`), of a file, a download or a snapshot: where they lie, their digest, and which tensors are
in them. No torch."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stagerun.base.errors import DataError, StagerunError, UsageError, listing
from stagerun.base.nets import ignored_in
from stagerun.base.recipe import MEAN_DIGEST, WEIGHTS_DIGEST, Schedule, Stage, Transform, Weights
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count
from stagerun.base.weights import Kind, Place, is_caffes, is_hdf5, place_of
from stagerun.base.wings import require_wing
from stagerun.store.disk import LocalDisk
from stagerun.store.layout import snapshots_folder
from stagerun.store.read import inspect, inventory, read_file
from stagerun.system.files import mapped
from stagerun.system.image_sets import with_sets
from stagerun.system.imports import with_imports

if TYPE_CHECKING:  # these need numpy, and `plan` does without
    import numpy as np
    from numpy.typing import NDArray

    from stagerun.caffe.binary import SolverState

# The file of a snapshot that holds its weights: `train.progress.WEIGHTS`.
TENSORS = "model.safetensors"
_MOST_HEADER = 4_000_000
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Found:
    """`path`: the file with the tensors. Of a snapshot `ref` and its output folder `out`, too. `state`: a .solverstate that names the file, and
    `held` what is in it."""

    path: Path
    out: Path | None = None
    ref: SnapshotRef | None = None
    state: Path | None = None
    held: "SolverState | None" = None

    @property
    def name(self) -> str:
        return self.ref.name if self.ref is not None else self.path.name


def torchvision_cache() -> Path:
    """Where torch.hub keeps what it downloads."""
    home = os.environ.get("TORCH_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    return Path(home).expanduser() / "hub" / "checkpoints"


def timm_cache() -> Path:
    """Where the Hugging Face Hub's library keeps what it downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def find(weights: Weights) -> Found:
    """Where they lie. UsageError where they don't; StorageError, PermissionDenied, ResumeRefused."""
    if weights.state:
        return _of_state(weights)
    place = place_of(weights.file)
    if place.kind is Kind.SNAPSHOT:
        return _snapshot(weights, place)
    if place.kind is Kind.FILE:
        return Found(regular_file(Path(weights.path), "the file is relative to the schedule's folder"))
    fetch = "`stagerun check DIR --fetch` downloads what a schedule names"
    if place.kind is Kind.TORCHVISION:
        folder = torchvision_cache()
        exact = folder / f"{place.name}.pth"
        found = [exact] if exact.exists() else sorted(folder.glob(f"{place.name}-????????.pth"))
        if len(found) > 1:
            names = listing([f"torchvision/{path.stem}" for path in found])
            raise UsageError(f"{folder} has {len(found)} sets of weights for `{place.name}`", f"name one: {names}")
        if not found:
            raise UsageError(f"{folder} has no weights for `{place.name}`", fetch)
        return Found(regular_file(found[0], fetch))
    repository = timm_cache() / f"models--timm--{place.name}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise UsageError(f"{timm_cache()} has no weights for `{place.name}`", fetch) from None
    return Found(regular_file(repository / "snapshots" / revision / TENSORS, fetch))


def regular_file(path: Path, hint: str) -> Path:
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return path
        raise UsageError(f"{path} is not a regular file", hint)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from None


def _of_state(weights: Weights) -> Found:
    """As `caffe train --snapshot` finds them; beside the state where the path in it, which may be another machine's, leads nowhere."""
    state = regular_file(Path(weights.path), "the file is relative to the schedule's folder")
    held = _state_in(mapped(state), weights.file)  # its numbers stay where they lie, in the file
    learned = held.learned_net
    if not learned:
        raise UsageError(
            f"{state} does not say which file has its weights", "Caffe writes one beside it, a .caffemodel"
        )
    beside = state.parent / PurePosixPath(learned).name
    places = [Path(learned)] * learned.startswith("/") + [state.parent / learned, beside]
    found = next((path for path in places if path.is_file()), None)
    if found is None:
        raise UsageError(
            f"{beside}, the weights of {weights.file}, are not there", "copy the .caffemodel to that place"
        )
    return Found(found, state=state, held=held)


def read_state(path: Path, name: str, digest: str) -> "SolverState":
    """A .solverstate, that of the `digest` (`digest_of`); '' is any. DataError; OSError."""
    data = path.read_bytes()
    if digest and hashlib.sha256(data).hexdigest() != digest.split()[1]:
        raise DataError(f"{path} has changed since the run looked at it", "start again when it is written")
    return _state_in(data, name)


def _state_in(data: bytes | memoryview, name: str) -> "SolverState":
    try:
        if is_hdf5(data):
            return require_wing("caffe.hdf5.read_state")(bytes(data))
        return require_wing("caffe.binary.read_state")(data)
    except ValueError as error:
        raise DataError(
            f"{name} is not a .solverstate of Caffe's: {error}", "name one, and copy it again if it is cut off"
        ) from error


def _snapshot(weights: Weights, place: Place) -> Found:
    out = Path(weights.path)
    if not os.path.isdir(snapshots_folder(out)):
        hint = f"train it with `stagerun run DIR --out {out}`, or write `OUT:STAGE` with the OUT that `run` wrote to"
        raise UsageError(f"{out} is not the output folder of a run", hint)
    found = inventory(LocalDisk(), out, looking=True).snapshots
    own = [ref for ref in found if ref.stage == place.name]
    at = [ref for ref in own if (ref.ends_stage if place.iter is None else ref.iter == place.iter)]
    if not own:
        names = list(dict.fromkeys(ref.stage for ref in found))
        hint = f"there are snapshots of {listing(names, 'and')}" if names else "nothing was trained there"
        raise UsageError(f"{out} has no snapshot of stage `{place.name}`", hint)
    if not at:
        where = "its end" if place.iter is None else f"iteration {place.iter}"
        places = listing([f"{place.name}@{one}" for one in sorted({ref.iter for ref in own})])
        raise UsageError(f"{out} has no snapshot of `{place.name}` at {where}", f"there are {places}")
    ref = max(at, key=lambda ref: (ref.attempt, ref.serial))
    return Found(snapshots_folder(out) / ref.name / TENSORS, out, ref)


def digest_of(found: Found) -> str:
    """sha256 of the file with the tensors: of a snapshot, as it says itself. Of a .solverstate: its iteration, its digest, and that.
    StorageError and the like; OSError."""
    if found.ref is not None and found.out is not None:
        return inspect(LocalDisk(), found.out, found.ref.name).files[TENSORS].sha256
    if found.state is not None and found.held is not None:
        return f"{found.held.iter} {_digest(found.state)} {_digest(found.path)}"
    return _digest(found.path)


def _digest(path: Path) -> str:
    seen = os.stat(path)
    return _hashed(str(path), seen.st_size, seen.st_mtime_ns, seen.st_ino)


@lru_cache(maxsize=64)
def _hashed(path: str, *changes: int) -> str:
    """`changes`: what tells another file at the same path. Each process hashes a file once: 100 MB take some 0.1 s."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def mean_digests(schedule: Schedule) -> dict[str, str]:
    """sha256 of each `mean_file` by the name that the schedule has for it; '' of one that can't be read here."""
    found: dict[str, str] = {}
    for stage in schedule.stages:
        for transform in (stage.solver.transform, stage.solver.test_transform):
            if transform.mean_file is not None and transform.mean_file not in found:
                found[transform.mean_file] = ""
                with suppress(OSError):
                    found[transform.mean_file] = _digest(Path(transform.mean_path))
    return found


def looked_at(schedule: Schedule, out: Path) -> Schedule:
    """The schedule with what the files that it names hold, as far as they are on this machine: of images which there are, of weights and mean
    images their digests, in the identities of stages. `out`: its output folder, where folders of images are imported to."""
    schedule = with_sets(with_imports(schedule, out), lambda stage: ignored_in(stage).train)
    return replace(schedule, stages=tuple(map(_with_digests, schedule.stages)))


def _with_digests(stage: Stage) -> Stage:
    found = dict(stage.identity)
    # The stage may be done, and a file gone; who needs the file says so.
    if (weights := stage.solver.start) is not None:
        with suppress(StagerunError, OSError):
            found[WEIGHTS_DIGEST] = digest_of(find(weights))
    if stage.solver.transform.mean_file is not None:
        with suppress(OSError):
            found[MEAN_DIGEST] = _digest(Path(stage.solver.transform.mean_path))
    return replace(stage, identity=found) if found != stage.identity else stage


def data_of(found: Found, most: int, digest: str) -> bytes:
    """The bytes of the tensors' file, those that have the `digest` (`digest_of`); '' is any. DataError; a snapshot's are verified."""
    if found.ref is not None and found.out is not None:
        data = read_file(LocalDisk(), snapshots_folder(found.out) / found.ref.name, TENSORS, most)[1]
    else:
        try:
            data = found.path.read_bytes()
        except OSError as error:
            raise DataError(f"{found.path} can't be read: {error.strerror}") from error
    if digest and hashlib.sha256(data).hexdigest() != digest.split()[-1]:
        raise DataError(f"{found.path} has changed while it was read", "start again when it is written")
    return data


def header_of(found: Found, name: str, of: Any = None) -> Mapping[str, tuple[int, ...]] | None:
    """Names and shapes in a safetensors file or a .caffemodel, whose tensors are not read; None for a file of another kind. `of`: the net of
    Caffe's that they are for. DataError."""
    with open(found.path, "rb") as file:
        start = file.read(9)
        if is_caffes(start, found.path.name):
            try:
                return require_wing("caffe.blob_names.shapes")(mapped(found.path), of)
            except ValueError as error:
                raise DataError(f"{name}: {error}", "it is not a whole .caffemodel") from error
        length = int.from_bytes(start[:8], "little")
        if not 2 <= length <= _MOST_HEADER:
            return None
        text = start[8:] + file.read(length - 1)
    try:
        header = json.loads(text)
        return {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# -- The mean image of a transform (`mean_file`), which Caffe's compute_image_mean makes.


def mean_image(transform: Transform, channels: int, digest: str = "") -> "NDArray[np.float32] | None":
    """float32 [height, width, channels] in B, G, R: the `mean_file` that has the `digest`, where one is given; None of a transform without.
    UsageError, DataError."""
    if transform.mean_file is None:
        return None
    path = regular_file(Path(transform.mean_path), "`mean_file` is relative to the schedule's folder")
    seen = os.stat(path)
    found, read = _mean(str(path), transform.mean_file, seen.st_size, seen.st_mtime_ns)
    if digest and read != digest:
        text = f"{transform.mean_file} is another file than before: its sha256 is {read[:12]}, and was {digest[:12]}"
        raise DataError(
            text, "a snapshot needs the one that it was trained with; `run` takes a new one when it is started again"
        )
    if found.shape[2] != channels:
        text = f"{transform.mean_file} has {count(found.shape[2], 'channel')}, and the images have {channels}"
        raise DataError(text, "make it of these images, with Caffe's compute_image_mean")
    return found


@lru_cache(maxsize=4)
def _mean(path: str, name: str, *changes: int) -> "tuple[NDArray[np.float32], str]":
    """The mean, and the sha256 of the bytes that it was made of."""
    import numpy as np

    data = bytes(mapped(Path(path)))
    try:
        found = require_wing("caffe.binary.read_mean")(data)
    except ValueError as error:
        raise DataError(f"{name}: {error}", "it is not a mean image of Caffe's (.binaryproto)") from error
    if not np.isfinite(found).all():
        raise DataError(f"{name} is not all numbers: it has NaN or infinity", "make it anew, with compute_image_mean")
    return np.ascontiguousarray(found.transpose(1, 2, 0), np.float32), hashlib.sha256(data).hexdigest()
