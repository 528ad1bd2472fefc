"""Several runs beside each other: mean and spread over seeds, the ranking, what differed, and what came out, in words. Pure."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stagerun.base.events import EnsembleTested, StageFinished
from stagerun.base.recipe import FROM_ITER, point
from stagerun.base.text import listed
from stagerun.tools.report.history import Run, StageHistory, lived_on, start_in_words
from stagerun.tools.report.table import Column, Table, Value, table_of

SEEDS = ("seed", "solver.random_seed")

# What the log has for each process life; a snapshot knows its own life only.
_OF_LIVES = {"workers": "workers", "threads": "threads", "device": "device", "stagerun": "version"}


class Spread(NamedTuple):
    """`sd` is the sample's (n - 1). All is None for no values, and `sd` for one."""

    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None


def spread(values: Iterable[float | None]) -> Spread:
    """None among the values are left out."""
    found = [value for value in values if value is not None]
    if not found:
        return Spread()
    sd = statistics.stdev(found) if len(found) > 1 else None
    return Spread(statistics.fmean(found), sd, min(found), max(found))


@dataclass(frozen=True, slots=True)
class Group:
    """One stage as several runs have finished it, alike but for the seed."""

    stage: str
    members: Sequence[tuple[Run, StageHistory, StageFinished]]

    @property
    def runs(self) -> list[str]:
        return [run.label for run, _, _ in self.members]

    @property
    def seeds(self) -> list[str]:
        return [run.seed(stage) or "unknown" for run, stage, _ in self.members]

    @property
    def last(self) -> bool:
        """Whether no other stage starts from it."""
        return all(stage in run.leaves() for run, stage, _ in self.members)

    def of(self, field: str) -> Spread:
        """The spread of a field of the results."""
        return spread(getattr(end, field) for _, _, end in self.members)

    def gain(self) -> Spread:
        return spread(run.gain(stage) for run, stage, _ in self.members)


def groups(runs: Sequence[Run]) -> list[Group]:
    """In the running order of the first run that has the stage. Runs that have not finished it are left out."""
    members: dict[tuple[object, ...], list[tuple[Run, StageHistory, StageFinished]]] = {}
    names = dict.fromkeys(stage.name for run in runs for stage in run.history.stages)
    for name in names:
        for run in runs:
            stage = run.history.stage(name)
            if stage and stage.finished and name not in run.stale:
                key = (name, *recipe_but_seeds(run, stage))
                members.setdefault(key, []).append((run, stage, stage.finished))
    return [Group(found[0][1].name, found) for found in members.values()]


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
    """What must be equal for runs to have evaluated the same ensemble. Where that can't be known, it is like no other: it was made
    from snapshots that its stages didn't end with, or that are gone."""
    stages = [run.history.stage(name) for name, _ in map(point, tested.members)]
    recipes = [None if stage is None else recipe_but_seeds(run, stage) for stage in stages]
    places = [iter for _, iter in map(point, tested.members)]
    ends = [result for result, iter in zip(run.alone(tested), places, strict=True) if iter is None]
    if None in recipes or None in ends or run.earlier(tested):
        return tested.name, run.label
    return tested.name, tested.rule, tested.batch_norm_iter, tested.shape, *places, *recipes


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


# -- the first lines of a report: what came out, in words

MOST = 8  # runs that a title names, and sentences about ends and about ensembles


def title(runs: Sequence[Run]) -> str:
    """`fashion_collapse: seed1, seed2, seed3`; `icons32` alone where both are the same."""
    names = ", ".join(dict.fromkeys(run.history.schedule or "unknown schedule" for run in runs))
    labels = f"{len(runs)} runs" if len(runs) > MOST else ", ".join(run.label for run in runs)
    return names if names == labels else f"{names}: {labels}"


def lead(runs: Sequence[Run]) -> list[str]:
    """A sentence for each end of the schedule that was reached and each ensemble, of many for the best; and for each run that is not
    finished."""
    ends = [(mean, _sentence(g, mean)) for g in groups(runs) if g.last and (mean := g.of("top1").mean) is not None]
    found = [*_best(ends, "ends"), *_best(list(map(_ensemble, ensemble_groups(runs))), "ensembles")]
    found += [f"{run.label} is not finished: {run.state_in_words}." for run in runs if run.state_in_words != "finished"]
    return found


def _best(said: Sequence[tuple[float, str]], what: str) -> list[str]:
    """The sentences about so many top-1."""
    if len(said) <= MOST:
        return [text for _, text in said]
    ranked = sorted(said, key=lambda one: -one[0])
    rest = [top1 for top1, _ in ranked[MOST:]]
    more = f"{len(rest)} more {what}: top-1 {100 * rest[-1]:.2f} to {100 * rest[0]:.2f} %."
    return [*(text for _, text in ranked[:MOST]), more]


def _against(gain: float) -> str:
    return f"{100 * abs(gain):.2f} points {'below' if gain < 0 else 'above'}"


def _sentence(group: Group, mean: float) -> str:
    sd, gain, ema = group.of("top1").sd, group.gain().mean, group.of("ema_top1").mean
    text = f"Top-1 {100 * mean:.2f} %"
    if sd is not None:
        text += f" (sd {100 * sd:.2f} over {len(group.runs)} runs, seeds {', '.join(group.seeds)})"
    text += f" at the end of {group.stage}"
    if gain is not None:
        text += f", {_against(gain)} the {'average' if group.members[0][1].average else 'stage'} it starts from"
    if ema is not None:
        text += f"; with averaged weights {100 * ema:.2f} %"
    return text + ("." if len(group.runs) > 1 else f" ({group.runs[0]}).")


def _ensemble(group: Sequence[tuple[Run, EnsembleTested]]) -> tuple[float, str]:
    """Top-1 and a sentence."""
    labels = [run.label for run, _ in group]
    top1 = statistics.fmean(tested.top1 for _, tested in group)
    gain = statistics.fmean(tested.gain for _, tested in group)
    # Its members, or what they follow from, may have been trained on since.
    earlier = " of earlier members" if any(run.stale & {*tested.members} for run, tested in group) else ""
    whose = f"mean of {listed(labels, MOST)}" if len(labels) > 1 else labels[0]
    name = f"Ensemble {group[0][1].name}{earlier}"
    return top1, f"{name}: top-1 {100 * top1:.2f} %, {_against(gain)} its best member ({whose})."


# -- tables


def seeds_table(runs: Sequence[Run]) -> Table:
    """Mean and spread of each stage over runs that are alike but for the seed."""
    found = groups(runs)
    several = max(Counter(g.stage for g in found).values(), default=0) > 1  # recipes of one stage
    cells: list[tuple[Column, Callable[..., Value]]] = [
        (Column("stage", "stage", "text"), lambda g: g.stage),
        (Column("runs", "runs" if several else "", "text"), lambda g: ", ".join(g.runs)),
        (Column("n", "n", "count"), lambda g: len(g.runs)),
        (Column("seeds", "seeds", "text"), lambda g: ", ".join(g.seeds)),
    ]
    for key, title in (("top1", "top-1"), ("ema_top1", "EMA top-1")):
        cells += [
            (Column(f"{key}_mean", f"{title} mean", "percent"), lambda g, key=key: g.of(key).mean),
            (Column(f"{key}_sd", "sd", "spread"), lambda g, key=key: g.of(key).sd),
            (Column(f"{key}_min", "min", "percent"), lambda g, key=key: g.of(key).low),
            (Column(f"{key}_max", "max", "percent"), lambda g, key=key: g.of(key).high),
        ]
    cells += [
        (Column("test_loss_mean", "validation loss mean", "loss"), lambda g: g.of("test_loss").mean),
        (Column("test_loss_sd", "sd", "loss"), lambda g: g.of("test_loss").sd),
        (Column("gain_mean", "gain mean", "points"), lambda g: g.gain().mean),
        (Column("gain_sd", "sd", "spread"), lambda g: g.gain().sd),
        (Column("train_seconds_mean", "time mean", "time"), lambda g: g.of("train_seconds").mean),
    ]
    notes = [
        "sd: the sample's standard deviation (n - 1), in percentage points; only runs that have finished the stage"
    ]
    if any(len(set(g.seeds)) < len(g.seeds) for g in found):
        notes.append("where a seed stands twice, mean and sd are not over seeds alone")
    return table_of("Over seeds", cells, ((g,) for g in found), *notes)


_RANKING = (
    Column("rank", "#", "count"),
    Column("what", "stage or ensemble", "text"),
    Column("run", "run", "text"),
    Column("n", "n", "count", dull=1),
    Column("top1_mean", "top-1", "percent"),
    Column("top1_sd", "sd", "spread"),
    Column("test_loss_mean", "validation loss", "loss"),
    Column("test_loss_sd", "sd", "loss"),
    Column("ema_top1_mean", "EMA top-1", "percent"),
)


def ranking_table(runs: Sequence[Run]) -> Table:
    """Stages and ensembles by top-1, the best first: those of runs that are alike but for the seed as one row."""
    found: list[tuple[Value, ...]] = []

    def add(what: str, labels: Sequence[str], top1: Spread, loss: Spread, ema: Spread) -> None:
        of = ", ".join(labels) if len(labels) <= MOST else f"{len(labels)} runs"
        if top1.mean is not None:
            found.append((what, of, len(labels), top1.mean, top1.sd, loss.mean, loss.sd, ema.mean))

    for g in groups(runs):
        add(g.stage, g.runs, g.of("top1"), g.of("test_loss"), g.of("ema_top1"))
    for group in ensemble_groups(runs):
        tested = [one for _, one in group]
        top1, loss = spread(e.top1 for e in tested), spread(e.loss for e in tested)
        add(f"ensemble {tested[0].name}", [run.label for run, _ in group], top1, loss, Spread())
    ranked = sorted(found, key=lambda row: -float(row[3] or 0.0))
    note = "mean and sd (the sample's, n - 1; of top-1 in percentage points) over runs that differ by the seed alone"
    rows = tuple((n, *row) for n, row in enumerate(ranked, 1))
    return Table("Ranking", _RANKING, rows, (note,) if any(row[2] != 1 for row in ranked) else ())


# -- what differed


def settings(run: Run, stage: StageHistory) -> dict[str, str]:
    """The fields of a stage's recipe that are set, and `from`; empty where its snapshots are gone."""
    identity = run.identities.get(stage.name)
    if identity is None:
        return {}
    fields = {field.removeprefix("solver."): value for field, value in sorted(identity.items()) if field != FROM_ITER}
    return fields | {"from": start_in_words(run, stage)}


def _facts(run: Run, stage: StageHistory | None) -> dict[tuple[str, str], str]:
    """(kind, field) -> value for one stage of one run."""
    if stage is None:
        return {}
    facts = {("recipe", field): value for field, value in settings(run, stage).items()}
    facts |= {("environment", field): value for field, value in run.environments.get(stage.name, {}).items()}
    if stage.trained:
        facts |= {("environment", field): lived_on(run, stage, of) for field, of in _OF_LIVES.items()}
    if stage.finished and stage.finished.tested_on:
        facts["evaluation", "images"], facts["evaluation", "number, transform"] = _test_set(stage)
    return facts


def _differences(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """(kind, field, stages, value in each run), as far as logs and snapshots say: fields of the recipe and of the environment. Stages with
    the same values are put together. A run in which a stage has no snapshot has '?' there."""
    whole = {
        "name": tuple(run.history.schedule for run in runs),
        "stages": tuple(" ".join(s.name for s in run.history.stages) for run in runs),
    }
    found = [("schedule", what, "", *values) for what, values in whole.items() if len(set(values)) > 1]
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
        if field != "random_seed" or ("recipe", "seed", values) not in per_stage:  # it follows the seed
            found.append((kind, field, "all" if names == stages else ", ".join(names), *values))
    order = ("schedule", "recipe", "environment", "evaluation")
    return sorted(found, key=lambda row: order.index(row[0]))


def differences_table(runs: Sequence[Run]) -> Table:
    """One row per thing that differed, a column for each run."""
    columns = [Column("kind", "of", "text"), Column("field", "field", "text")]
    columns += [Column("stages", "stages", "text"), *(Column(run.label, run.label, "text") for run in runs)]
    rows = tuple(_differences(runs))
    without = {run.label: [s.name for s in run.history.stages if s.name not in run.identities] for run in runs}
    missing = [f"{label} ({', '.join(gone)})" for label, gone in without.items() if gone]
    notes = [] if rows else ["nothing differs, as far as the logs and snapshots say"]
    if missing:
        notes.append(f"?: no snapshot shows the recipe: {'; '.join(missing)}")
    return Table("Differences", tuple(columns), rows, tuple(notes))
