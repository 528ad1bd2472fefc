"""The plan for each ensemble: whether it can be evaluated or already was; and the facts that an evaluation depends on. Pure."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from stagerun.base.events import EnsembleTested
from stagerun.base.recipe import AVERAGE, AVERAGE_OF, Ensemble, Schedule, Stage, point
from stagerun.base.snapshots import SnapshotRef, same_set
from stagerun.base.text import columns, count, listed
from stagerun.language.values import NONE, at_default, leaves
from stagerun.plan.hours import EVALUATION_SHARE, Speed, Spent
from stagerun.plan.planned import Plan

# -- the facts besides weights that an evaluation depends on

SEPARATOR = " + "  # between texts of several validation sets


def tested_set(schedule: Schedule, stage: Stage) -> str:
    """Return the identity of the stage's validation images, as far as known: texts of `image_sets.set_of`, with digests."""
    return SEPARATOR.join(schedule.sets.get(val.path, "") for val in stage.data.val)


def _same_sets(schedule: Schedule, stage: Stage, tested: str) -> list[bool | None]:
    before, now = tested.split(SEPARATOR), tested_set(schedule, stage).split(SEPARATOR)
    return [same_set(*pair) for pair in zip(before, now, strict=False)]


def other_set(schedule: Schedule, stage: Stage, tested: str) -> bool:
    """Return whether the stage's validation images certainly differ from a result's (`tested`: its `tested_set`)."""
    return False in _same_sets(schedule, stage, tested)


def tested_on(stage: Stage) -> str:
    """Return the images as written and the transform of a stage's evaluation; '' without validation images."""
    return f"{_images(stage)} {_seen_as(stage)[0]}" if stage.data.val else ""


def _images(stage: Stage) -> str:
    return SEPARATOR.join(f"{val.source} {val.images}" for val in stage.data.val)


def _seen_as(stage: Stage) -> tuple[str, str]:
    """Return the transform's non-default fields, so that new fields of the language don't invalidate results, with digests of labels; then
    the same as earlier versions wrote it."""
    transform, of_training = stage.solver.test_transform, "solver.transform_param"  # a message with the same defaults
    fields = leaves(transform, of_training)
    texts = [f"{key.removeprefix(f'{of_training}.')}: {text}" for key, text in fields if not at_default(key, text)]
    before = str(replace(transform, mean_path=""))
    for unset in (", crop_size_ramp=None", ", python=None", ", mean_file=None, mean_path=''"):
        before = before.replace(unset, "")  # of versions without the field
    labels = [val.labels_digest for val in stage.data.val if val.labels_digest]
    return " ".join(["{", *texts, "}", *labels]), " ".join([before, *labels])


def tested_alike(schedule: Schedule, stage: Stage, tested: str, images: str) -> bool:
    """Return whether a result (its `tested_on` and `tested_set`) has the stage's current images and transform. Images that are certainly the
    same may have moved."""
    if not stage.data.val:
        return not tested
    same = _same_sets(schedule, stage, images)
    moved = all(same) and images.count(SEPARATOR) == len(stage.data.val) - 1
    # Earlier versions wrote the absolute paths of the images.
    absolute = SEPARATOR.join(f"{val.path} {val.images}" for val in stage.data.val)
    images_texts = [f" {stage.data.val[-1].images}"] if moved else [_images(stage), absolute]
    ends = tuple(f"{where} {seen}" for where in images_texts for seen in _seen_as(stage))
    return False not in same and (tested.endswith(ends) if moved else tested in ends)


# -- ensembles


class EnsembleState(enum.Enum):
    OFF = "off"  # a member is not enabled
    WAITING = "waiting"  # for members that are not trained
    READY = "ready"
    DONE = "done"


class PlannedEnsemble(NamedTuple):
    """The plan for an ensemble. `members`: its snapshots (READY, DONE). `result`: None unless DONE."""

    ensemble: Ensemble
    state: EnsembleState
    members: tuple[SnapshotRef, ...] = ()
    why: str = ""
    result: EnsembleTested | None = None

    @property
    def is_left(self) -> bool:
        return self.state in (EnsembleState.READY, EnsembleState.WAITING)


def plan_ensembles(plan: Plan, results: Mapping[str, EnsembleTested]) -> tuple[PlannedEnsemble, ...]:
    """Plan the ensembles. `results`: by the ensemble's name; a result from other members, weights or settings does not count."""
    by_name = {s.name: s for s in plan.stages}

    def planned(ensemble: Ensemble) -> PlannedEnsemble:
        if off := [name for name in dict.fromkeys(s for s, _ in ensemble.points) if not by_name[name].stage.enabled]:
            why = f"{listed(off)} {'is' if len(off) == 1 else 'are'} not enabled"
            return PlannedEnsemble(ensemble, EnsembleState.OFF, why=why)
        refs = [by_name[s].end if iter is None else plan.points.get((s, iter)) for s, iter in ensemble.points]
        if missing := [member for member, ref in zip(ensemble.members, refs, strict=True) if ref is None]:
            return PlannedEnsemble(ensemble, EnsembleState.WAITING, why=f"for {listed(in_words(missing))}")
        members = tuple(ref for ref in refs if ref is not None)
        why, result = "", results.get(ensemble.name)
        if result is not None:
            now = made_from(plan.schedule, ensemble, members)
            if result.snapshots == now["snapshots"]:  # the stages may have been renamed
                names = dict(zip(result.members, ensemble.members, strict=True))
                result = replace(result, members=ensemble.members, best=names.get(result.best, result.best))
            changed = [word for name, word in _OTHER.items() if getattr(result, name) != now[name]]
            first = plan.schedule.stage(ensemble.points[0][0])
            if not tested_alike(plan.schedule, first, result.tested_on, result.tested_set):
                changed.append("other images or another transform")
            if not changed:
                return PlannedEnsemble(ensemble, EnsembleState.DONE, members, result=result)
            why = f"evaluated with {listed(changed)}"
        return PlannedEnsemble(ensemble, EnsembleState.READY, members, why)

    return tuple(map(planned, plan.schedule.ensembles))


_OTHER = {
    "members": "other members",
    "snapshots": "other weights",
    "rule": "another rule",
    "batch_norm_iter": "another batch_norm_iter",
    "shape": "another shape",
}


def made_from(schedule: Schedule, ensemble: Ensemble, members: Sequence[SnapshotRef]) -> dict[str, Any]:
    """Return the fields of an EnsembleTested that name its sources, for an evaluation now."""
    return {
        "members": ensemble.members,
        "snapshots": tuple(ref.id for ref in members),
        "rule": ensemble.rule.value,
        "batch_norm_iter": ensemble.batch_norm_iter if ensemble.averages else 0,
        "shape": ensemble.shape,
        # The members' transforms are the same: `check` requires it.
        "tested_on": tested_on(schedule.stage(ensemble.points[0][0])),
    }


def made_of(identity: Mapping[str, str] | None, tested: EnsembleTested) -> bool:
    """Return whether the evaluated weights are the average that a stage started with; True if its identity is unknown."""
    had = {
        AVERAGE_OF: " ".join(tested.snapshots),
        f"{AVERAGE}rule": tested.rule,
        f"{AVERAGE}shape": tested.shape or NONE,
        f"{AVERAGE}batch_norm_iter": str(tested.batch_norm_iter),
    }
    return identity is None or all(identity.get(field) == text for field, text in had.items())


# -- the time it takes


def ensembles_left(
    schedule: Schedule, ensembles: Sequence[PlannedEnsemble], speeds: Mapping[str, Speed]
) -> dict[str, Spent | None]:
    """Return the time of each ensemble that is not evaluated yet, by `ensemble NAME`; None if a member's speed is unknown."""
    return {f"ensemble {e.ensemble.name}": _left(schedule, e.ensemble, speeds) for e in ensembles if e.is_left}


def _left(schedule: Schedule, ensemble: Ensemble, speeds: Mapping[str, Speed]) -> Spent | None:
    """Estimate the time as if each member were evaluated separately, which is too long if decoding the images dominates; members from before
    a stage's end are evaluated once more."""
    if not all(name in speeds for name, _ in ensemble.points):
        return None
    # With averaged weights, `test` covers two evaluations.
    tests = [speeds[n].test / (1 if schedule.stage(n).solver.ema_decay is None else 2) for n, _ in ensemble.points]
    alone = sum(test for test, (_, iter) in zip(tests, ensemble.points, strict=True) if iter is not None)
    if ensemble.averages:
        forward = ensemble.batch_norm_iter * speeds[ensemble.points[0][0]].iteration * EVALUATION_SHARE
        return Spent(tests=alone + forward + tests[0])
    return Spent(tests=sum(tests) + alone)


# -- the output


def ensembles_text(ensembles: Sequence[PlannedEnsemble]) -> str:
    """Return a table, and the memory that each pending evaluation takes; '' without ensembles."""
    if not ensembles:
        return ""
    rows: list[Sequence[str]] = [("ensemble", "rule", "members", "state")]
    for one in ensembles:
        members = ", ".join(in_words(one.ensemble.members))
        rows.append((one.ensemble.name, rule_in_words(one.ensemble), members, state_in_words(one)))
    costs = [f"  {e.ensemble.name}: {_at_once(e.ensemble)}" for e in ensembles if e.is_left]
    return "\n".join([*columns(rows), *costs])


def rule_in_words(ensemble: Ensemble) -> str:
    return ensemble.rule.value + (f", {ensemble.shape}" if ensemble.shape else "")


def in_words(members: Sequence[str]) -> list[str]:
    """Return the members, with many snapshots of a stage as one.

    >>> in_words(["a", "trunk@100", "trunk@200", "trunk@300", "trunk"])
    ['a', 'trunk@100..300 (3 snapshots)', 'trunk']
    """
    words: list[str] = []
    for stage, group in groupby(map(point, members), key=lambda member: member[0]):
        points = [iter for _, iter in group]
        iters = [iter for iter in points if iter is not None]
        if len(iters) > 2 and iters == sorted(iters):
            words.append(f"{stage}@{iters[0]}..{iters[-1]} ({len(iters)} snapshots)")
        else:
            words += [f"{stage}@{iter}" for iter in iters]
        if None in points:
            words.append(stage)
    return words


def _at_once(ensemble: Ensemble) -> str:
    """Return the memory use of an evaluation, in words."""
    if ensemble.averages:
        images = f"{count(ensemble.batch_norm_iter, 'iteration')} of {ensemble.points[0][0]}'s images"
        return f"one network of averaged weights, its BatchNorm statistics recomputed over {images}"
    return f"the weights of {count(len(ensemble.members), 'network')} are in each worker's memory at a time, one pass over the images"


def state_in_words(planned: PlannedEnsemble) -> str:
    if (done := planned.result) is not None:
        return f"done, top-1 {100 * done.top1:.2f} % ({100 * done.gain:+.2f} against {done.best})"
    words = {EnsembleState.OFF: "not evaluated: ", EnsembleState.WAITING: "waiting "}
    return words.get(planned.state, "ready: " if planned.why else "ready") + planned.why


def ensembles_record(ensembles: Sequence[PlannedEnsemble]) -> list[dict[str, object]]:
    """Return a record for JSON; the fields of a missing result are None."""
    figures = ("top1", "top5", "loss", "best", "gain", "gain_over_mean")
    return [
        {
            "name": e.ensemble.name,
            "rule": e.ensemble.rule.value,
            "members": list(e.ensemble.members),
            "batch_norm_iter": e.ensemble.batch_norm_iter if e.ensemble.averages else None,
            **({"shape": e.ensemble.shape} if e.ensemble.shape else {}),
            "state": e.state.value,
            "why": e.why,
            **{name: getattr(e.result, name, None) for name in figures},
        }
        for e in ensembles
    ]
