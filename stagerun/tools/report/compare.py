"""Several runs beside each other: mean and spread over seeds, what differed, and what came out, in words. Pure."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.events import EnsembleTested
from stagerun.base.recipe import FROM_ITER
from stagerun.tools.report.history import Run, StageHistory, lived_on, start_in_words

SEEDS = ("seed", "solver.random_seed")

# What the log has for each process life; a snapshot knows its own life only.
_OF_LIVES = {"workers": "workers", "threads": "threads", "device": "device", "stagerun": "version"}


@dataclass(frozen=True, slots=True)
class Spread:
    """`sd` is the sample's (n - 1); None for one value."""

    n: int
    mean: float
    sd: float | None
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """None for no values."""
    if not values:
        return None
    sd = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), sd, min(values), max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One stage as several runs have finished it, alike but for the seed."""

    stage: str
    runs: tuple[str, ...]
    seeds: tuple[str, ...]
    last: bool  # no other stage starts from it
    top1: Spread | None
    ema_top1: Spread | None
    test_loss: Spread | None
    gain: Spread | None
    seconds: Spread


def groups(runs: Sequence[Run]) -> list[Group]:
    """In running order of the first run that has the stage; runs that have not finished it are not in it."""
    members: dict[tuple[object, ...], list[tuple[Run, StageHistory]]] = {}
    names = dict.fromkeys(stage.name for run in runs for stage in run.history.stages)
    for name in names:
        for run in runs:
            stage = run.history.stage(name)
            if stage and stage.finished and name not in run.stale:
                members.setdefault((name, *recipe_but_seeds(run, stage)), []).append((run, stage))
    return [_group(found) for found in members.values()]


def _group(members: Sequence[tuple[Run, StageHistory]]) -> Group:
    ends = [(run, stage, stage.finished) for run, stage in members if stage.finished]
    seconds = spread([end.train_seconds for _, _, end in ends])
    assert seconds is not None
    return Group(
        stage=members[0][1].name,
        runs=tuple(run.label for run, _ in members),
        seeds=tuple(run.seed(stage) or "unknown" for run, stage in members),
        last=all(stage in run.leaves() for run, stage in members),
        top1=spread([end.top1 for _, _, end in ends if end.top1 is not None]),
        ema_top1=spread([end.ema_top1 for _, _, end in ends if end.ema_top1 is not None]),
        test_loss=spread([end.test_loss for _, _, end in ends if end.test_loss is not None]),
        gain=spread([gain for run, stage, _ in ends if (gain := run.gain(stage)) is not None]),
        seconds=seconds,
    )


def ensemble_groups(runs: Sequence[Run]) -> list[list[tuple[Run, EnsembleTested]]]:
    """Ensembles that several runs have evaluated, alike but for the seed. By name, in the order of the runs."""
    found: dict[tuple[object, ...], list[tuple[Run, EnsembleTested]]] = {}
    names = dict.fromkeys(tested.name for run in runs for tested in run.history.ensembles)
    for name in names:
        for run in runs:
            for tested in run.history.ensembles:
                if tested.name == name:
                    found.setdefault(_made_from(run, tested), []).append((run, tested))
    return list(found.values())


def _made_from(run: Run, tested: EnsembleTested) -> tuple[object, ...]:
    """What must be equal for runs to have evaluated the same ensemble. Where that can't be known (it was made from other snapshots
    than its stages have ended with, or from ones that are gone) it is like no other."""
    stages = [run.history.stage(name) for name in tested.members]
    recipes = [None if stage is None else recipe_but_seeds(run, stage) for stage in stages]
    if None in recipes or None in run.alone(tested) or run.earlier(tested):
        return tested.name, run.label
    return tested.name, tested.rule, tested.batch_norm_iter, *recipes


def recipe_but_seeds(run: Run, stage: StageHistory) -> tuple[object, ...]:
    """What must be equal for runs to differ by seed alone: the recipe of the stage and its ancestors, and what it was
    tested on. Where snapshots are gone, what the log says of them."""
    return (_test_set(stage)[1], *(_recipe(run, step) for step in run.path(stage)))


def _recipe(run: Run, stage: StageHistory) -> tuple[object, ...]:
    identity = run.identities.get(stage.name)
    if identity is not None:
        return stage.name, *sorted((k, v) for k, v in identity.items() if k not in SEEDS)
    end = stage.finished
    known = (end.first_lr, end.last_lr, end.weight_decay, end.augmentation, end.ema_top1 is None) if end else ()
    return stage.name, stage.max_iter, stage.batch_size, *known


def _test_set(stage: StageHistory) -> tuple[str, str]:
    """Where the images are, and what must be equal for accuracies to be comparable: their number and the transform."""
    text = stage.finished.tested_on if stage.finished else ""
    found = re.fullmatch(r"(.*) (\d+ Transform\(.*\))", text, re.DOTALL)
    return (found[1], found[2]) if found else ("", text)


@dataclass(frozen=True, slots=True)
class Difference:
    """`values` are in the order of the runs."""

    kind: str  # "schedule", "recipe", "environment" or "evaluation"
    field: str
    stages: str
    values: tuple[str, ...]


def differences(runs: Sequence[Run]) -> list[Difference]:
    """What the runs were not alike in, of what their logs and snapshots say: fields of the recipe and of the
    environment, stages with the same values put together. A run in which a stage has no snapshot has '?' there.
    """
    found = [
        Difference("schedule", what, "", values)
        for what, values in (
            ("name", tuple(run.history.schedule for run in runs)),
            ("stages", tuple(" ".join(s.name for s in run.history.stages) for run in runs)),
        )
        if len(set(values)) > 1
    ]
    stages = list(dict.fromkeys(s.name for run in runs for s in run.history.stages))
    per_stage: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for name in stages:
        facts = [_facts(run, run.history.stage(name)) for run in runs]
        for kind, field in dict.fromkeys(key for fact in facts for key in fact):
            # A field that a run doesn't name is unknown if it names none of the kind.
            absent = ["(none)" if any(other == kind for other, _ in fact) else "?" for fact in facts]
            values = tuple(fact.get((kind, field), none) for fact, none in zip(facts, absent, strict=True))
            if len({value for value in values if value != "?"}) > 1:
                per_stage.setdefault((kind, field, values), []).append(name)
    for (kind, field, values), names in per_stage.items():
        if field == "random_seed" and ("recipe", "seed", values) in per_stage:
            continue  # it follows the seed
        found.append(Difference(kind, field, "all" if names == stages else ", ".join(names), values))
    order = ("schedule", "recipe", "environment", "evaluation")
    return sorted(found, key=lambda d: order.index(d.kind))


def _facts(run: Run, stage: StageHistory | None) -> dict[tuple[str, str], str]:
    """(kind, field) -> value for one stage of one run."""
    if stage is None:
        return {}
    facts = {}
    identity = run.identities.get(stage.name)
    if identity is not None:
        facts = {
            ("recipe", field.removeprefix("solver.")): value
            for field, value in sorted(identity.items())
            if field != FROM_ITER
        }
        facts["recipe", "from"] = start_in_words(run, stage)
    facts |= {("environment", field): value for field, value in run.environments.get(stage.name, {}).items()}
    if stage.trained:
        facts |= {("environment", field): lived_on(run, stage, of) for field, of in _OF_LIVES.items()}
    if stage.finished and stage.finished.tested_on:
        facts["evaluation", "images"], facts["evaluation", "number, transform"] = _test_set(stage)
    return facts


# -- the first lines of a report: what came out, in words

# A title names so many runs.
MOST_NAMES = 8


def title(runs: Sequence[Run]) -> str:
    """`fashion_collapse: seed1, seed2, seed3`; `icons32` alone where both are the same."""
    names = ", ".join(dict.fromkeys(run.history.schedule or "unknown schedule" for run in runs))
    labels = f"{len(runs)} runs" if len(runs) > MOST_NAMES else ", ".join(run.label for run in runs)
    return names if names == labels else f"{names}: {labels}"


def lead(runs: Sequence[Run]) -> list[str]:
    """A sentence for each end of the schedule that was reached, and one for the runs that are not finished."""
    found = [_sentence(group) for group in groups(runs) if group.last and group.top1]
    found += _ensembles(runs)
    found += [f"{run.label} is not finished: {run.state_in_words}." for run in runs if run.state_in_words != "finished"]
    return found


def _sentence(group: Group) -> str:
    top1, gain, ema = group.top1, group.gain, group.ema_top1
    assert top1 is not None
    text = f"Top-1 {100 * top1.mean:.2f} %"
    if top1.sd is not None:
        text += f" (sd {100 * top1.sd:.2f} over {top1.n} runs, seeds {', '.join(group.seeds)})"
    text += f" at the end of {group.stage}"
    if gain:
        text += f", {100 * abs(gain.mean):.2f} points {'below' if gain.mean < 0 else 'above'} the stage it starts from"
    if ema:
        text += f"; with averaged weights {100 * ema.mean:.2f} %"
    return text + ("." if len(group.runs) > 1 else f" ({group.runs[0]}).")


def _ensembles(runs: Sequence[Run]) -> list[str]:
    """A sentence for each ensemble, those of runs that differ by seed alone put together."""
    found = []
    together = ensemble_groups(runs)
    for group in together:
        name, labels = group[0][1].name, [run.label for run, _ in group]
        top1 = statistics.fmean(tested.top1 for _, tested in group)
        gain = statistics.fmean(tested.gain for _, tested in group)
        several = sum(other[0][1].name == name for other in together) > 1  # recipes of that name
        whose = f"mean of {', '.join(labels) if several else f'{len(labels)} runs'}" if len(labels) > 1 else labels[0]
        what = f"{name}{_earlier(group)}"
        difference = f"{100 * abs(gain):.2f} points {'below' if gain < 0 else 'above'}"
        found.append(f"Ensemble {what}: top-1 {100 * top1:.2f} %, {difference} its best member ({whose}).")
    return found


def _earlier(group: Sequence[tuple[Run, EnsembleTested]]) -> str:
    """That it was made of what its members were, where they, or what they follow from, have been trained on since."""
    labels = [run.label for run, tested in group if not run.stale.isdisjoint(tested.members)]
    if not labels:
        return ""
    return " of earlier members" if len(labels) == len(group) else f" of earlier members in {', '.join(labels)}"
