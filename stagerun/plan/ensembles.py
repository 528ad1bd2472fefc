"""Plan + results so far -> for each ensemble, whether it can be evaluated or already was. Pure."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from stagerun.base.events import EnsembleTested
from stagerun.base.recipe import AVERAGE, AVERAGE_OF, Ensemble, Schedule, point
from stagerun.base.snapshots import SnapshotRef
from stagerun.base.text import columns, count, listed
from stagerun.language.values import NONE
from stagerun.plan.counting import tested_alike, tested_on
from stagerun.plan.hours import EVALUATION_SHARE, Speed, Spent
from stagerun.plan.plan import Plan


class EnsembleState(enum.Enum):
    OFF = "off"  # a member is not enabled
    WAITING = "waiting"  # for members that are not trained
    READY = "ready"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEnsemble:
    """`members` are the snapshots that it is made from (READY, DONE). `result` is there if DONE."""

    ensemble: Ensemble
    state: EnsembleState
    members: tuple[SnapshotRef, ...] = ()
    why: str = ""
    result: EnsembleTested | None = None


def plan_ensembles(plan: Plan, results: Mapping[str, EnsembleTested]) -> tuple[PlannedEnsemble, ...]:
    """`results` by the ensemble's name; one that was made from something else than is there now does not count."""
    by_name = {s.stage.name: s for s in plan.stages}

    def planned(ensemble: Ensemble) -> PlannedEnsemble:
        stages = dict.fromkeys(name for name, _ in ensemble.points)
        if off := [name for name in stages if not by_name[name].stage.enabled]:
            why = f"{listed(off)} {'is' if len(off) == 1 else 'are'} not enabled"
            return PlannedEnsemble(ensemble=ensemble, state=EnsembleState.OFF, why=why)
        found = [by_name[s].end if iter is None else plan.points.get((s, iter)) for s, iter in ensemble.points]
        if left := [member for member, ref in zip(ensemble.members, found, strict=True) if ref is None]:
            return PlannedEnsemble(ensemble=ensemble, state=EnsembleState.WAITING, why=f"for {listed(in_words(left))}")
        members = tuple(ref for ref in found if ref is not None)
        result = results.get(ensemble.name)
        why = ""
        if result is not None:
            now = made_from(plan.schedule, ensemble, members)
            if result.snapshots == now["snapshots"]:  # under the names that their stages have now
                names = dict(zip(result.members, ensemble.members, strict=True))
                result = replace(result, members=ensemble.members, best=names.get(result.best, result.best))
            changed = [name for name, value in now.items() if getattr(result, name) != value and name != "tested_on"]
            first = plan.schedule.stage(ensemble.points[0][0])
            if not tested_alike(plan.schedule, first, result.tested_on, result.tested_set):
                changed.append("tested_on")
            if not changed:
                return PlannedEnsemble(ensemble=ensemble, state=EnsembleState.DONE, members=members, result=result)
            why = f"evaluated with {listed([_WORDS[name] for name in changed])}"
        return PlannedEnsemble(ensemble=ensemble, state=EnsembleState.READY, members=members, why=why)

    return tuple(map(planned, plan.schedule.ensembles))


_WORDS = {
    "snapshots": "other weights",
    "members": "other members",
    "rule": "another rule",
    "batch_norm_iter": "another batch_norm_iter",
    "shape": "another shape",
    "tested_on": "other images or another transform",
}


def made_from(schedule: Schedule, ensemble: Ensemble, members: Sequence[SnapshotRef]) -> dict[str, Any]:
    """The fields of an EnsembleTested that say what it was made from, of one that is made now."""
    averaged = ensemble.rule.averages
    return {
        "members": ensemble.members,
        "snapshots": tuple(ref.id for ref in members),
        "rule": ensemble.rule.value,
        "batch_norm_iter": ensemble.batch_norm_iter if averaged else 0,
        "shape": ensemble.shape,
        # The members' transforms are the same: `check` sees to that.
        "tested_on": tested_on(schedule.stage(ensemble.points[0][0])),
    }


def made_of(ref: SnapshotRef, tested: EnsembleTested) -> bool:
    """Whether the weights that were evaluated are the average that the snapshot's stage started with."""
    had = {
        AVERAGE_OF: " ".join(tested.snapshots),
        f"{AVERAGE}rule": tested.rule,
        f"{AVERAGE}shape": tested.shape or NONE,
    }
    had[f"{AVERAGE}batch_norm_iter"] = str(tested.batch_norm_iter)
    return all(ref.identity.get(field) == text for field, text in had.items())


# -- how long it takes


def ensembles_left(
    schedule: Schedule, ensembles: Sequence[PlannedEnsemble], speeds: Mapping[str, Speed]
) -> dict[str, Spent | None]:
    """For each ensemble that is still to be evaluated, by `ensemble NAME`; None where that is not known of a member."""
    to_do = [e.ensemble for e in ensembles if e.state in (EnsembleState.READY, EnsembleState.WAITING)]
    return {f"ensemble {e.name}": _left(schedule, e, speeds) for e in to_do}


def _left(schedule: Schedule, ensemble: Ensemble, speeds: Mapping[str, Speed]) -> Spent | None:
    """As if each member were evaluated by itself, which is too much where making the images takes the time; those from before a stage's
    end are, besides."""
    found = [(schedule.stage(name).solver, speeds.get(name)) for name, _ in ensemble.points]
    # With averaged weights, `test` covers two evaluations.
    tests = [speed.test / (1 if solver.ema_decay is None else 2) for solver, speed in found if speed is not None]
    if len(tests) < len(found):
        return None
    alone = sum(test for test, (_, iter) in zip(tests, ensemble.points, strict=True) if iter is not None)
    if ensemble.rule.averages:
        forward = ensemble.batch_norm_iter * speeds[ensemble.points[0][0]].iteration * EVALUATION_SHARE
        return Spent(tests=alone + forward + tests[0])
    return Spent(tests=sum(tests) + alone)


# -- what is shown


def ensembles_text(ensembles: Sequence[PlannedEnsemble]) -> str:
    """A table, and what evaluating each of those to come takes; '' without ensembles."""
    if not ensembles:
        return ""
    rows: list[Sequence[str]] = [("ensemble", "rule", "members", "state")]
    for one in ensembles:
        members = ", ".join(in_words(one.ensemble.members))
        rows.append((one.ensemble.name, rule_in_words(one.ensemble), members, _state_in_words(one)))
    waiting = EnsembleState.READY, EnsembleState.WAITING
    costs = [f"  {e.ensemble.name}: {at_once(e.ensemble)}" for e in ensembles if e.state in waiting]
    return "\n".join([*columns(rows), *costs])


def rule_in_words(ensemble: Ensemble) -> str:
    return ensemble.rule.value + (f", {ensemble.shape}" if ensemble.shape else "")


def in_words(members: Sequence[str]) -> list[str]:
    """The members, many snapshots of a stage as one.

    >>> in_words(["a", "trunk@100", "trunk@200", "trunk@300", "trunk"])
    ['a', 'trunk@100..300 (3 snapshots)', 'trunk']
    """
    found: list[str] = []
    for stage, points in groupby((point(member) for member in members), key=lambda place: place[0]):
        places = list(points)
        iters = [iter for _, iter in places if iter is not None]
        many = len(iters) > 2 and iters == sorted(iters)
        found += (
            [f"{stage}@{iters[0]}..{iters[-1]} ({len(iters)} snapshots)"] if many else [f"{stage}@{i}" for i in iters]
        )
        found += [stage] * (len(places) > len(iters))
    return found


def at_once(ensemble: Ensemble) -> str:
    """What an evaluation has in memory, in words."""
    if ensemble.rule.averages:
        return (
            f"one network of averaged weights, its BatchNorm statistics taken anew over "
            f"{count(ensemble.batch_norm_iter, 'iteration')} of {ensemble.points[0][0]}'s images"
        )
    return f"the weights of {count(len(ensemble.members), 'network')} are in each worker's memory at a time, one pass over the images"


def _state_in_words(planned: PlannedEnsemble) -> str:
    if planned.result is not None:
        return f"done, top-1 {100 * planned.result.top1:.2f} % ({100 * planned.result.gain:+.2f} against {planned.result.best})"
    if planned.state is EnsembleState.OFF:
        return f"not evaluated: {planned.why}"
    if planned.state is EnsembleState.WAITING:
        return f"waiting {planned.why}"
    return "ready" + (f": {planned.why}" if planned.why else "")


_FIGURES = ("top1", "top5", "loss", "best", "gain", "gain_over_mean")


def ensembles_record(ensembles: Sequence[PlannedEnsemble]) -> list[dict[str, object]]:
    """For JSON; the fields of a result are None where there is none."""
    return [
        {
            "name": e.ensemble.name,
            "rule": e.ensemble.rule.value,
            "members": list(e.ensemble.members),
            "batch_norm_iter": e.ensemble.batch_norm_iter if e.ensemble.rule.averages else None,
            **({"shape": e.ensemble.shape} if e.ensemble.shape else {}),
            "state": e.state.value,
            "why": e.why,
            **{name: getattr(e.result, name, None) for name in _FIGURES},
        }
        for e in ensembles
    ]
