"""Several runs beside each other: mean and spread over seeds, what differed, speed by number of workers, and what came out, in words. Pure."""

import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagerun.base.events import EnsembleTested
from stagerun.base.recipe import FROM_ITER, point
from stagerun.tools.report.history import Life, Run, Span, StageHistory, lived_on, start_in_words
from stagerun.tools.report.table import Cells, Column, Table, Value, table_of

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
    averaged: bool  # it starts from an average, not from a stage
    seconds: Spread


def groups(runs: Sequence[Run]) -> list[Group]:
    """In the running order of the first run that has the stage. Runs that have not finished it are left out."""
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
        averaged=bool(members[0][1].average),
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
    """What must be equal for runs to have evaluated the same ensemble. Where that can't be known, it is like no other: it was made
    from snapshots that its stages didn't end with, or that are gone."""
    stages = [run.history.stage(name) for name, _ in map(point, tested.members)]
    recipes = [None if stage is None else recipe_but_seeds(run, stage) for stage in stages]
    places = [iter for _, iter in map(point, tested.members)]
    ends = [result for result, iter in zip(run.alone(tested), places, strict=True) if iter is None]
    if None in recipes or None in ends or run.earlier(tested):
        return tested.name, run.label
    return tested.name, tested.rule, tested.batch_norm_iter, tested.shape, tested.hold_out, *places, *recipes


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
    """What differs between the runs, as far as their logs and snapshots say: fields of the recipe and of the
    environment. Stages with the same values are put together. A run in which a stage has no snapshot has '?' there.
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


# -- the first lines of a report: what came out, in words

# A title names this many runs at most, and the first lines have this many sentences about ends, and about ensembles, at most.
MOST_NAMES = MOST_SAID = 8
BEST = 3  # of more


def title(runs: Sequence[Run]) -> str:
    """`fashion_collapse: seed1, seed2, seed3`; `icons32` alone where both are the same."""
    names = ", ".join(dict.fromkeys(run.history.schedule or "unknown schedule" for run in runs))
    labels = f"{len(runs)} runs" if len(runs) > MOST_NAMES else ", ".join(run.label for run in runs)
    return names if names == labels else f"{names}: {labels}"


def lead(runs: Sequence[Run]) -> list[str]:
    """A sentence for each end of the schedule that was reached, of many for the few that matter, and one for the runs that are not
    finished."""
    ends = [(group.top1.mean, _sentence(group)) for group in groups(runs) if group.last and group.top1]
    found = [*_few(ends, "ends"), *_few(_ensembles(runs), "ensembles")]
    found += [f"{run.label} is not finished: {run.state_in_words}." for run in runs if run.state_in_words != "finished"]
    return found


def _few(said: Sequence[tuple[float, str]], what: str) -> list[str]:
    """The sentences about so many top-1; of many those about the best and the worst, and what lies between."""
    if len(said) <= MOST_SAID:
        return [text for _, text in said]
    ranked = sorted(said, key=lambda one: -one[0])
    between = ranked[BEST:-1]
    rest = f"{len(between)} more {what} lie between: top-1 {100 * between[-1][0]:.2f} to {100 * between[0][0]:.2f} %."
    lowest = ranked[-1][1]
    return [*(text for _, text in ranked[:BEST]), rest, f"The lowest: {lowest[0].lower()}{lowest[1:]}"]


def _sentence(group: Group) -> str:
    top1, gain, ema = group.top1, group.gain, group.ema_top1
    assert top1 is not None
    text = f"Top-1 {100 * top1.mean:.2f} %"
    if top1.sd is not None:
        text += f" (sd {100 * top1.sd:.2f} over {top1.n} runs, seeds {', '.join(group.seeds)})"
    text += f" at the end of {group.stage}"
    if gain:
        text += f", {100 * abs(gain.mean):.2f} points {'below' if gain.mean < 0 else 'above'} the {'average' if group.averaged else 'stage'} it starts from"
    if ema:
        text += f"; with averaged weights {100 * ema.mean:.2f} %"
    return text + ("." if len(group.runs) > 1 else f" ({group.runs[0]}).")


def _ensembles(runs: Sequence[Run]) -> list[tuple[float, str]]:
    """Top-1 and a sentence for each ensemble. Those of runs that differ only by seed are put together."""
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
        found.append((top1, f"Ensemble {what}: top-1 {100 * top1:.2f} %, {difference} its best member ({whose})."))
    return found


def _earlier(group: Sequence[tuple[Run, EnsembleTested]]) -> str:
    """Words for an ensemble whose members, or what they follow from, have been trained on since; else ''."""
    labels = [run.label for run, tested in group if not run.stale.isdisjoint(tested.members)]
    if not labels:
        return ""
    return " of earlier members" if len(labels) == len(group) else f" of earlier members in {', '.join(labels)}"


# -- tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """`speed_up` and `efficiency` are against the row with the fewest workers; at 1.0 each worker does as much as there."""

    schedule: str
    device: str
    workers: int
    threads: tuple[int, ...]
    batch: tuple[int, ...]
    runs: tuple[str, ...]
    images_per_second: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process life did of one stage."""

    run: str
    life: Life
    stage: str
    span: Span


def speeds(runs: Sequence[Run]) -> tuple[list[Speed], list[str]]:
    """A row for each number of workers, and notes.

    Stages differ in speed (image size, device batch), so only those that were trained with every number of workers
    count, each with the same weight in all rows. An iteration that was done again counts once.
    """
    seen: dict[tuple[str, str], dict[int, list[_Work]]] = {}
    for run in runs:
        lives = {life.number: life for life in run.history.lives if life.workers}
        for stage in run.history.stages:
            for number, span in (stage.trained.lives if stage.trained else {}).items():
                if life := lives.get(number):
                    by_workers = seen.setdefault((run.history.schedule, life.device), {})
                    by_workers.setdefault(life.workers, []).append(_Work(run.label, life, stage.name, span))
    found, notes = [], []
    for (schedule, device), by_workers in sorted(seen.items()):
        stages = [list(dict.fromkeys(work.stage for work in works)) for works in by_workers.values()]
        common = [name for name in stages[0] if all(name in other for other in stages)]
        left_out = sorted({name for other in stages for name in other} - set(common))
        if left_out and common:
            notes.append(
                f"speed of {schedule} is over {', '.join(common)}: not every number of workers trained "
                f"{', '.join(left_out)}"
            )
        if not common:
            notes.append(
                f"{schedule}: no stage was trained with every number of workers, so their speeds can't be compared"
            )
            continue
        found += _rows(schedule, device, by_workers, common)
    return found, notes


def _rows(schedule: str, device: str, by_workers: Mapping[int, Sequence[_Work]], stages: Sequence[str]) -> list[Speed]:
    spans = {
        workers: {name: [work.span for work in works if work.stage == name] for name in stages}
        for workers, works in sorted(by_workers.items())
    }
    weights = {name: max(sum(s.images for s in of[name]) for of in spans.values()) for name in stages}
    rows: list[Speed] = []
    for workers, of in spans.items():
        seconds = sum(
            weights[name] * sum(s.seconds for s in of[name]) / max(1, sum(s.images for s in of[name]))
            for name in stages
        )
        speed = sum(weights.values()) / seconds if seconds else 0.0
        base = rows[0] if rows else None
        speed_up = speed / base.images_per_second if base and base.images_per_second else 1.0
        rows.append(
            Speed(
                schedule=schedule,
                device=device,
                workers=workers,
                threads=tuple(sorted({work.life.threads for work in by_workers[workers]})),
                batch=tuple(sorted(set().union(*(span.batches for name in stages for span in of[name])))),
                runs=tuple(dict.fromkeys(work.run for work in by_workers[workers])),
                images_per_second=speed,
                speed_up=speed_up,
                efficiency=speed_up * base.workers / workers if base else 1.0,
            )
        )
    return rows


def seeds_table(runs: Sequence[Run]) -> Table:
    """Mean and spread of each stage over runs that are alike but for the seed."""
    found = groups(runs)
    several = max(Counter(g.stage for g in found).values(), default=0) > 1  # recipes of one stage
    columns = [Column("stage", "stage", "text"), Column("runs", "runs" if several else "", "text")]
    columns += [Column("n", "n", "count"), Column("seeds", "seeds", "text")]
    for key, title in (("top1", "top-1"), ("ema_top1", "EMA top-1")):
        columns += [Column(f"{key}_mean", f"{title} mean", "percent"), Column(f"{key}_sd", "sd", "spread")]
        columns += [Column(f"{key}_min", "min", "percent"), Column(f"{key}_max", "max", "percent")]
    columns += [Column("test_loss_mean", "validation loss mean", "loss"), Column("test_loss_sd", "sd", "loss")]
    columns += [Column("gain_mean", "gain mean", "points"), Column("gain_sd", "sd", "spread")]
    columns += [Column("train_seconds_mean", "time mean", "time")]
    rows: list[tuple[Value, ...]] = []
    for g in found:
        spreads: list[Value] = []
        for s in (g.top1, g.ema_top1):
            spreads += [s.mean, s.sd, s.low, s.high] if s else [None] * 4
        gain = (g.gain.mean, g.gain.sd) if g.gain else (None, None)
        who = (", ".join(g.runs), len(g.runs), ", ".join(g.seeds))
        loss = (g.test_loss.mean, g.test_loss.sd) if g.test_loss else (None, None)
        rows.append((g.stage, *who, *spreads, *loss, *gain, g.seconds.mean))
    notes = [
        "sd: the sample's standard deviation (n - 1), in percentage points; only runs that have finished the stage"
    ]
    if any(len(set(g.seeds)) < len(g.seeds) for g in found):
        notes.append("where a seed stands twice, mean and sd are not over seeds alone")
    return Table("Over seeds", tuple(columns), tuple(rows), tuple(notes))


def ranking_table(runs: Sequence[Run]) -> Table:
    """Stages and ensembles by top-1, the best first: those of runs that are alike but for the seed as one row; of a stage in
    training its last evaluation."""
    found: list[tuple[Value, ...]] = []

    def add(what: str, labels: Sequence[str], *numbers: Spread | None) -> None:
        top1, loss, ema = numbers
        of = ", ".join(labels) if len(labels) <= MOST_NAMES else f"{len(labels)} runs"
        if top1 is not None:
            means = [(s.mean, s.sd) if s else (None, None) for s in (top1, loss)]
            found.append((what, of, top1.n, *means[0], *means[1], ema.mean if ema else None))

    for g in groups(runs):
        add(g.stage, g.runs, g.top1, g.test_loss, g.ema_top1)
    for run in runs:
        most = max((test.images for stage in run.history.stages for _, test in stage.tests), default=0)
        for stage in run.history.stages:
            if stage.finished is None and stage.tests:
                last = [test for _, test in stage.tests if test.iter == stage.tests[-1][1].iter]
                own, averaged = ([t for t in last if t.ema is ema] for ema in (False, True))
                kinds = [t.top1 for t in own], [t.loss for t in own], [t.top1 for t in averaged]
                fewer = f", {last[0].images} images" if last[0].images < most else ""
                what = f"{stage.name} at {last[0].iter} of {stage.max_iter}{fewer}"
                add(what, [run.label], *map(spread, kinds))
    for group in ensemble_groups(runs):
        tested, labels = [e for _, e in group], [run.label for run, _ in group]
        losses = [e.loss for e in tested if e.loss is not None]
        add(f"ensemble {tested[0].name}", labels, spread([e.top1 for e in tested]), spread(losses), None)
    columns = (
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
    ranked = sorted(found, key=lambda row: -float(row[3] or 0.0))
    several = any(row[2] != 1 for row in ranked)
    note = ("mean and sd (the sample's, n - 1; of top-1 in percentage points) over runs that differ by the seed alone",)
    return Table("Ranking", columns, tuple((n, *row) for n, row in enumerate(ranked, 1)), note if several else ())


_WORKERS: Cells = (
    (Column("schedule", "schedule", "text"), lambda s: s.schedule),
    (Column("device", "device", "text"), lambda s: s.device),
    (Column("workers", "workers", "count"), lambda s: s.workers),
    (Column("threads", "threads", "text"), lambda s: ", ".join(map(str, s.threads))),
    (Column("batch_size", "batch", "text"), lambda s: ", ".join(map(str, s.batch))),
    (Column("runs", "runs", "text"), lambda s: ", ".join(s.runs)),
    (Column("images_per_second", "images/s", "speed"), lambda s: s.images_per_second),
    (Column("speed_up", "speed-up", "factor"), lambda s: s.speed_up),
    (Column("efficiency", "efficiency", "share"), lambda s: s.efficiency),
)


def workers_table(runs: Sequence[Run]) -> Table:
    """Speed and efficiency by number of workers."""
    found, notes = speeds(runs)
    why = "images/s: of training, the first iterations of a life among them; speed-up against the fewest workers"
    return table_of("By number of workers", _WORKERS, ((speed,) for speed in found), why, *notes)


def differences_table(runs: Sequence[Run]) -> Table:
    """One row per thing that differed, a column for each run."""
    columns = [Column("kind", "of", "text"), Column("field", "field", "text")]
    columns += [Column("stages", "stages", "text"), *(Column(run.label, run.label, "text") for run in runs)]
    rows = tuple((d.kind, d.field, d.stages, *d.values) for d in differences(runs))
    without = {run.label: [s.name for s in run.history.stages if s.name not in run.identities] for run in runs}
    missing = [f"{label} ({', '.join(gone)})" for label, gone in without.items() if gone]
    notes = [] if rows else ["nothing differs, as far as the logs and snapshots say"]
    if missing:
        notes.append(f"?: no snapshot shows the recipe: {'; '.join(missing)}")
    return Table("Differences", tuple(columns), rows, tuple(notes))
