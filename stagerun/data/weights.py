"""Weights that a stage starts with (`recipe.Weights`), of a file, a download or a snapshot: path, digest, and tensors. No torch."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from stagerun.base.errors import DataError, StagerunError, UsageError, listing
from stagerun.base.recipe import MEAN_DIGEST, WEIGHTS_DIGEST, Schedule, Stage, Transform, Weights
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import count
from stagerun.base.weights import Kind, Place, is_caffes, place_of
from stagerun.base.wings import ignored_in, require_wing
from stagerun.store.disk import LocalDisk
from stagerun.store.layout import snapshots_folder
from stagerun.store.read import inspect_folder, inventory, read_file
from stagerun.system.files import mapped
from stagerun.system.image_sets import with_imports, with_sets

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
    """`path`: the file with the tensors, in a snapshot `ref` if that is set. `state`: a .solverstate that names the file, and `held` its
    content."""

    path: Path
    ref: SnapshotRef | None = None
    state: Path | None = None
    held: "SolverState | None" = None

    @property
    def name(self) -> str:
        return self.ref.name if self.ref is not None else self.path.name


def torchvision_cache() -> Path:
    """Return the folder of torch.hub's downloads."""
    home = os.environ.get("TORCH_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "torch")
    return Path(home).expanduser() / "hub" / "checkpoints"


def timm_cache() -> Path:
    """Return the folder of the Hugging Face Hub's downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def find(weights: Weights) -> Found:
    """Locate the weights. UsageError if they are missing; StorageError, PermissionDenied, ResumeRefused."""
    if weights.state:
        return _of_state(weights)
    location = place_of(weights.file)
    if location.kind is Kind.SNAPSHOT:
        return _snapshot(weights, location)
    if location.kind is Kind.FILE:
        return Found(regular_file(Path(weights.path), "the file is relative to the schedule's folder"))
    fetch = "`stagerun check DIR --fetch` downloads what a schedule names"
    if location.kind is Kind.TORCHVISION:
        folder = torchvision_cache()
        exact = folder / f"{location.name}.pth"
        files = [exact] if exact.exists() else sorted(folder.glob(f"{location.name}-????????.pth"))
        if len(files) > 1:
            names = listing([f"torchvision/{path.stem}" for path in files])
            raise UsageError(f"{folder} has {len(files)} sets of weights for `{location.name}`", f"name one: {names}")
        if not files:
            raise UsageError(f"{folder} has no weights for `{location.name}`", fetch)
        return Found(regular_file(files[0], fetch))
    repository = timm_cache() / f"models--timm--{location.name}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        raise UsageError(f"{timm_cache()} has no weights for `{location.name}`", fetch) from None
    return Found(regular_file(repository / "snapshots" / revision / TENSORS, fetch))


def regular_file(path: Path, hint: str) -> Path:
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            return path
        raise UsageError(f"{path} is not a regular file", hint)
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}", hint) from None


def _of_state(weights: Weights) -> Found:
    """Locate weights as `caffe train --snapshot` does; next to the state if its path, perhaps another machine's, doesn't exist."""
    state = regular_file(Path(weights.path), "the file is relative to the schedule's folder")
    held = _state_in(mapped(state), weights.file)  # its numbers stay in the file
    learned = held.learned_net
    if not learned:
        raise UsageError(
            f"{state} does not say which file has its weights", "Caffe writes a .caffemodel next to it; name that"
        )
    sibling = state.parent / PurePosixPath(learned).name
    path = next(
        (path for path in (state.parent / learned, sibling) if path.is_file()), None
    )  # `/` ignores an absolute path's left side
    if path is None:
        raise UsageError(f"{sibling}, the weights of {weights.file}, is missing", "copy the .caffemodel to that path")
    return Found(path, state=state, held=held)


def read_state(path: Path, name: str, digest: str) -> "SolverState":
    """Read a .solverstate. DataError unless it has the `digest` (`digest_of`; '' is any); OSError."""
    data = path.read_bytes()
    if digest and hashlib.sha256(data).hexdigest() != digest.split()[1]:
        raise DataError(f"{path} has changed since the run looked at it", "start again when it is written")
    return _state_in(data, name)


def _state_in(data: bytes | memoryview, name: str) -> "SolverState":
    try:
        return require_wing("caffe.binary.read_state")(data)
    except ValueError as error:
        raise DataError(
            f"{name} is not a .solverstate of Caffe's: {error}", "name one, and copy it again if it is cut off"
        ) from error


def _snapshot(weights: Weights, location: Place) -> Found:
    out = Path(weights.path)
    if not os.path.isdir(snapshots_folder(out)):
        hint = f"train it with `stagerun run DIR --out {out}`, or write `OUT:STAGE` with the OUT that `run` wrote to"
        raise UsageError(f"{out} is not the output folder of a run", hint)
    snapshots = inventory(LocalDisk(), out, looking=True).snapshots
    matches = [
        ref
        for ref in snapshots
        if ref.stage == location.name and (ref.ends_stage if location.iter is None else ref.iter == location.iter)
    ]
    if not matches:
        moment = "its end" if location.iter is None else f"iteration {location.iter}"
        others = listing(list(dict.fromkeys(f"{ref.stage}@{ref.iter}" for ref in snapshots)), "and") or "none"
        raise UsageError(f"{out} has no snapshot of `{location.name}` at {moment}", f"its snapshots: {others}")
    ref = max(matches, key=lambda ref: (ref.attempt, ref.serial))
    return Found(snapshots_folder(out) / ref.name / TENSORS, ref)


def digest_of(found: Found) -> str:
    """Return the sha256 of the file with the tensors, from a snapshot's manifest. For a .solverstate: its iteration, its digest, and that.
    StorageError and the like; OSError."""
    if found.ref is not None:
        return inspect_folder(LocalDisk(), found.path.parent).files[TENSORS].sha256
    if found.state is not None and found.held is not None:
        return f"{found.held.iter} {_digest(found.state)} {_digest(found.path)}"
    return _digest(found.path)


def _digest(path: Path) -> str:
    status = os.stat(path)
    return _hashed(str(path), status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=64)
def _hashed(path: str, *changes: int) -> str:
    """Hash a file once per process: 100 MB take some 0.1 s. `changes` identify its state."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def mean_digests(schedule: Schedule) -> dict[str, str]:
    """Return the sha256 of each `mean_file` by its name in the schedule; '' if it is unreadable here."""
    digests: dict[str, str] = {}
    for stage in schedule.stages:
        for transform in (stage.solver.transform, stage.solver.test_transform):
            if transform.mean_file is not None and transform.mean_file not in digests:
                digests[transform.mean_file] = ""
                with suppress(OSError):
                    digests[transform.mean_file] = _digest(Path(transform.mean_path))
    return digests


def looked_at(schedule: Schedule, out: Path) -> Schedule:
    """Return the schedule with the sets of images, and with digests of weights and mean images in the identities of stages, as far as the
    files are on this machine. `out`: its output folder, which folders of images are imported to."""
    schedule = with_sets(with_imports(schedule, out), lambda stage: ignored_in(stage).train)
    return replace(schedule, stages=tuple(map(_with_digests, schedule.stages)))


def _with_digests(stage: Stage) -> Stage:
    identity = dict(stage.identity)
    # The stage may be done, and a file gone; a later reader reports it.
    if (weights := stage.solver.start) is not None:
        with suppress(StagerunError, OSError):
            identity[WEIGHTS_DIGEST] = digest_of(find(weights))
    if stage.solver.transform.mean_file is not None:
        with suppress(OSError):
            identity[MEAN_DIGEST] = _digest(Path(stage.solver.transform.mean_path))
    return replace(stage, identity=identity) if identity != stage.identity else stage


def data_of(found: Found, most: int, digest: str) -> bytes:
    """Read the tensors' file; verify a snapshot's. DataError unless it has the `digest` (`digest_of`; '' is any)."""
    if found.ref is not None:
        data = read_file(LocalDisk(), found.path.parent, TENSORS, most)[1]
    else:
        try:
            data = found.path.read_bytes()
        except OSError as error:
            raise DataError(f"{found.path} can't be read: {error.strerror}") from error
    if digest and hashlib.sha256(data).hexdigest() != digest.split()[-1]:
        raise DataError(f"{found.path} has changed while it was read", "start again when it is written")
    return data


def header_of(found: Found, name: str) -> Mapping[str, tuple[int, ...]] | None:
    """Return names and shapes in a safetensors file or a .caffemodel without reading the tensors; None for other formats.
    DataError."""
    with open(found.path, "rb") as file:
        start = file.read(9)
        if is_caffes(start, found.path.name):
            try:
                return require_wing("caffe.binary.shapes")(mapped(found.path))
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
    """Return float32 [height, width, channels] in B, G, R, the `mean_file`; None for a transform without one. DataError unless it has the
    `digest`, if that is set; UsageError."""
    if transform.mean_file is None:
        return None
    path = regular_file(Path(transform.mean_path), "`mean_file` is relative to the schedule's folder")
    status = os.stat(path)
    mean, read = _mean(str(path), transform.mean_file, status.st_size, status.st_mtime_ns)
    if digest and read != digest:
        text = f"{transform.mean_file} is another file than before: its sha256 is {read[:12]}, and was {digest[:12]}"
        raise DataError(
            text, "a snapshot needs the file that it was trained with; `run` takes a new one when it is started again"
        )
    if mean.shape[2] != channels:
        text = f"{transform.mean_file} has {count(mean.shape[2], 'channel')}, and the images have {channels}"
        raise DataError(text, "make it of these images, with Caffe's compute_image_mean")
    return mean


@lru_cache(maxsize=4)
def _mean(path: str, name: str, *changes: int) -> "tuple[NDArray[np.float32], str]":
    """Return the mean, and the sha256 of its file."""
    import numpy as np

    data = bytes(mapped(Path(path)))
    try:
        mean = require_wing("caffe.binary.read_mean")(data)
    except ValueError as error:
        raise DataError(f"{name}: {error}", "it is not a mean image of Caffe's (.binaryproto)") from error
    if not np.isfinite(mean).all():
        raise DataError(f"{name} is not all numbers: it has NaN or infinity", "make it again with compute_image_mean")
    return np.ascontiguousarray(mean.transpose(1, 2, 0), np.float32), hashlib.sha256(data).hexdigest()
