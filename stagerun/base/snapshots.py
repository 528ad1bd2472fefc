"""What is known about a snapshot without its tensors: values that plan, store and train hand to each other. No I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stagerun.base.errors import ResumeRefused

TRAINING_SET = "training set"  # what a snapshot's `environment` calls the images that it was trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    """One complete snapshot. `name` is its directory's name below OUT/snapshots; (stage, iter, attempt) is unique on disk.

    `id` is a digest of its tensors and place, not of clock or machine: training the same thing again gives the same id. `parent` is the id
    of the snapshot its stage started from, '' for the seed. `identity` is that of the stage when it was trained, `environment` what the
    bits depend on besides: torch build, processor, threads, workers, reducer, training set. `trained_as`: the name in its directory, where a
    plan gave it to a stage of another name. `id_stage`: the stage's name in `id`, if that is not the directory's: a renamed stage keeps its
    first name there, so that training it again gives the same ids. (attempt, serial) orders snapshots without a clock; `serial` counts those of
    a process life from 1, and is 0 in an older version's. `skipped`: images that `on_nan: ROLLBACK` left out along the path of ancestors.
    `began_empty`: its process life found no snapshot in the folder. `ended`: `early_stop` ended its stage there.
    """

    name: str
    stage: str
    iter: int
    attempt: int
    id: str
    parent: str
    identity: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    bytes: int = 0
    trained_as: str = ""
    id_stage: str = ""
    serial: int = 0
    skipped: int = 0
    began_empty: bool = False
    ended: bool = False

    @property
    def begun_as(self) -> str:
        """The name that its stage had when it began: that in `id`."""
        return self.id_stage or self.trained_as or self.stage

    @property
    def ends_stage(self) -> bool:
        """Whether its stage, as long as it was then, ends with it."""
        return self.ended or self.identity.get("solver.max_iter") == str(self.iter)

    def ends(self, max_iter: int) -> bool:
        """Whether it is the end of a stage that has so many iterations at most."""
        return self.ended or self.iter == max_iter

    def whole(self, field: str, default: int) -> int:
        """A whole number of the identity; `default` where it doesn't have the field. ResumeRefused for what no run writes."""
        text = self.identity.get(field, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise ResumeRefused(
                f"snapshot {self.name} says that {field} was {text[:40]!r}, which is not a whole number",
                "no run writes that: take the snapshot away, or choose another folder with --out",
            )
        return int(text)


def same_set(before: str, now: str) -> bool | None:
    """Whether two texts of `image_sets.with_sets` are of the same images, by all of them, a sample or the imported files' names and sizes,
    the first that both have; None if unknown."""
    old, new = (dict(re.findall(r"(sample|index|folder) (\w+)", text)) for text in (before, now))
    kind = next((kind for kind in ("index", "sample", "folder") if kind in old and kind in new), None)
    return None if kind is None else old[kind] == new[kind]


def how_far(ref: SnapshotRef) -> tuple[int, int, int]:
    """Order the snapshots of one stage by progress. Images left out come first: each rollback adds to them, so what was trained after one
    supersedes what came before it, also at a smaller iteration."""
    return ref.skipped, ref.iter, ref.attempt


def passed_over(name: str) -> str:
    """What is said of one of `Inventory.forbidden`."""
    return f"snapshot {name} may not be read by this user, and is passed over here; `run` would refuse to"


@dataclass(frozen=True)
class Inventory:
    """The complete snapshots of an output folder, oldest first by (attempt, serial), the names of damaged ones, and of those that this user
    may not read."""

    snapshots: tuple[SnapshotRef, ...] = ()
    damaged: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    @cached_property
    def by_stage(self) -> Mapping[str, tuple[SnapshotRef, ...]]:
        found: dict[str, list[SnapshotRef]] = {}
        for ref in self.snapshots:
            found.setdefault(ref.stage, []).append(ref)
        return {stage: tuple(refs) for stage, refs in found.items()}

    @cached_property
    def ids(self) -> frozenset[str]:
        return frozenset(ref.id for ref in self.snapshots)

    def of(self, stage: str) -> tuple[SnapshotRef, ...]:
        return self.by_stage.get(stage, ())
