"""What `method: AUTO` chose for a stage, and the times it went by: OUT/choices/STAGE.json. No torch: tables are made from it, too."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stagerun import store
from stagerun.base.recipe import Method, Stage
from stagerun.base.text import count
from stagerun.store.layout import choices_folder
from stagerun.system.typed import json_object, read_as
from stagerun.wire.values import Choice

DENSE = Method.NONE.value
_MOST = 16_000_000  # bytes of a file; of hundreds of layers it has some 10 kB


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`identity` is that of the stage, `parent` the id of the snapshot that it started from, '' for the seed: with others it doesn't count.

    `seconds`: of an iteration, of each method that was timed.
    """

    stage: str
    identity: str
    parent: str
    workers: int
    choice: dict[str, str]
    seconds: dict[str, float]

    @property
    def words(self) -> str:
        """The choice where the network's tensors aren't known: `dense, TOP_K for 16 tensors`."""
        rest, named = self.choice["*"], [method for name, method in self.choice.items() if name != "*"]
        base = "dense" if rest == DENSE else rest
        return ", ".join([base, *(f"{m} for {count(named.count(m), 'tensor')}" for m in dict.fromkeys(named))])


def identity_of(stage: Stage) -> str:
    return hashlib.sha256(json.dumps(dict(stage.identity), sort_keys=True).encode()).hexdigest()


def path_of(out: Path, stage: str) -> Path:
    return choices_folder(out) / f"{stage}.json"


def read_chosen(out: Path, stage: Stage) -> Chosen | None:
    """None if there is none, it can't be read, or is of another definition of the stage."""
    path = path_of(out, stage.name)
    try:
        data = store.LocalDisk().read(Path(os.path.realpath(path.parent)) / path.name, _MOST)
        found = read_as(Chosen, json_object(data))
    except (OSError, ValueError):
        return None
    return found if found.identity == identity_of(stage) else None


def write_chosen(disk: store.Disk, out: Path, chosen: Chosen) -> None:
    """Rank 0 only. StorageError, PermissionDenied."""
    store.write_atomic(disk, path_of(out, chosen.stage), json.dumps(asdict(chosen)).encode())


def grouped(sizes: Mapping[str, int], choice: Choice) -> list[tuple[str, int, int, str]]:
    """By method: how many tensors and numbers it has, and which, in words. `sizes`: numbers of each parameter, in model order."""
    names: dict[str, list[str]] = {}
    for name in sizes:
        names.setdefault(choice.get(name, choice["*"]), []).append(name)
    return [(m, len(own), sum(sizes[n] for n in own), _few(own)) for m, own in names.items()]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} to {names[-1]}"
