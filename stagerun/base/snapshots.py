"""Facts about snapshots without their tensors: values that plan, store and train exchange. No I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from stagerun.base.errors import ResumeRefused

TRAINING_SET = "training set"  # the key in a snapshot's `environment` of the images that it was trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    """A complete snapshot. `name` is its directory's name below OUT/snapshots; (stage, iter, attempt) is unique on disk.

    `id` is a digest of its tensors, stage and iteration, not of clock or machine: retraining gives the same id. `parent` is the id of the
    snapshot its stage started from, '' for fresh weights. `identity`: the stage's when it was trained; `environment`: the other facts
    that the bits depend on: torch build, processor, threads, workers, reducer, training set. `trained_as`: the name in its directory, if a
    plan assigned it to a stage of another name. `id_stage`: the stage's name in `id`, if it differs from the directory's: a renamed stage
    keeps its first name in ids, so that retraining gives the same ids. (attempt, serial) orders snapshots without a clock; `serial` counts
    the snapshots of a process life from 1, and is 0 in older versions. `skipped`: images that `on_nan: ROLLBACK` left out along the path of
    ancestors. `began_empty`: the folder was empty when its process life began. `ended`: `early_stop` ended its stage with it.
    `best`: the iteration of the best evaluation so far, 0 unless a stage starts from it.
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
    best: int = 0

    @property
    def begun_as(self) -> str:
        """Return the name under which its stage began, which is in `id`."""
        return self.id_stage or self.trained_as or self.stage

    @property
    def ends_stage(self) -> bool:
        """Return whether it was the end of its stage."""
        return self.ended or self.identity.get("solver.max_iter") == str(self.iter)

    def ends(self, max_iter: int) -> bool:
        """Return whether it is the end of a stage with at most `max_iter` iterations."""
        return self.ended or self.iter == max_iter

    def whole(self, field: str, default: int) -> int:
        """Return a whole number of the identity; `default` if it lacks the field. ResumeRefused for a text that stagerun never writes."""
        text = self.identity.get(field, str(default))
        if not text.isascii() or not text.isdigit() or len(text) > 18:
            raise ResumeRefused(
                f"snapshot {self.name} has {field} {text[:40]!r}, which is not a whole number",
                "stagerun never writes that: remove the snapshot, or choose another folder with --out",
            )
        return int(text)


def same_set(before: str, now: str) -> bool | None:
    """Return whether two texts of `image_sets.with_sets` mean the same images, by the index, a sample, or the imported files' names and sizes,
    whichever both have first; None if unknown."""
    old, new = (dict(re.findall(r"(sample|index|folder) (\w+)", text)) for text in (before, now))
    kind = next((kind for kind in ("index", "sample", "folder") if kind in old and kind in new), None)
    return None if kind is None else old[kind] == new[kind]


def how_far(ref: SnapshotRef) -> tuple[int, int, int]:
    """Return a sort key of a stage's snapshots by progress. Images left out come first: each rollback adds to them, so a snapshot after a rollback
    supersedes the ones before it, even at a smaller iteration."""
    return ref.skipped, ref.iter, ref.attempt


def passed_over(name: str) -> str:
    """Return the message about a snapshot in `Inventory.forbidden`."""
    return f"snapshot {name} can't be read by this user, and is ignored here; `run` would refuse it"


@dataclass(frozen=True)
class Inventory:
    """The complete snapshots of an output folder, oldest first by (attempt, serial), the names of damaged ones, and the names of snapshots that
    this user can't read."""

    snapshots: tuple[SnapshotRef, ...] = ()
    damaged: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()

    @cached_property
    def by_stage(self) -> Mapping[str, tuple[SnapshotRef, ...]]:
        by_stage: dict[str, list[SnapshotRef]] = {}
        for ref in self.snapshots:
            by_stage.setdefault(ref.stage, []).append(ref)
        return {stage: tuple(refs) for stage, refs in by_stage.items()}

    @cached_property
    def ids(self) -> frozenset[str]:
        return frozenset(ref.id for ref in self.snapshots)

    def of(self, stage: str) -> tuple[SnapshotRef, ...]:
        return self.by_stage.get(stage, ())
