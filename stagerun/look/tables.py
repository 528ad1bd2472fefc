"""The tables of runs, and of runs compared: mean and spread over seeds, the effect of a setting. Pure."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import fmean, stdev

from stagerun.base.errors import UsageError
from stagerun.base.recipe import FROM_ITER, point
from stagerun.base.table import Column, Row, Table, row_of
from stagerun.base.text import listed
from stagerun.look.history import Stage, epoch_number
from stagerun.look.runs import Run

MOST = 8  # runs named in a row
RUN, STAGE = Column("run", "run"), Column("stage", "stage")
_TOP1, _TOP5 = Column("top1", "top-1", "percent"), Column("top5", "top-5", "percent")
_EMA, _LOSS = Column("ema_top1", "EMA top-1", "percent"), Column("test_loss", "validation loss", "loss")
_RESULT = (_TOP1, Column("mean_ap", "mAP", "percent"), _TOP5, _LOSS, _EMA)
_CLASSES = (Column("balanced_accuracy", "", "percent"), Column("macro_f1", "", "percent"))  # in CSV only
_SPEED = Column("images_per_second", "images/s", "speed")
_EPOCHS = Column("epochs", "epochs", "epochs")
_TIME = Column("train_seconds", "training", "time", note="training: without evaluation and repeated work")
_SCORES = (_TOP1, _EMA, _LOSS, Column("gain", "gain", "points"), replace(_TIME, note=""))
_STATE = Column("state", "state", dull="done")


def runs_table(runs: Sequence[Run]) -> Table:
    """Return a row for each run, or for each end of a schedule with branches."""
    columns = (
        RUN,
        Column("schedule", "schedule"),
        Column("seed", "seed"),
        Column("end", "end"),
        _EPOCHS,
        *_RESULT,
        _TIME,
        Column("wall_seconds", "wall", "time", note="wall: of all process lives, with evaluation and repeated work"),
        Column("lives", "lives", "count"),
        _STATE,
    )
    rows: list[Row] = []
    for run in runs:
        about = row_of(columns, run.history, run=run.label, lives=len(run.history.lives), state=run.state_in_words)
        for end in run.leaves() or [Stage(name="")]:
            path = {"epochs": end.epoch(end.iter), "train_seconds": run.seconds(end)} if end.trained else {}
            rows.append(
                {**about, **_scored(run, end, end.finished, _RESULT), "seed": run.seed(end), "end": end.name, **path}
            )
    return Table("Runs", columns, rows)


def _scored(run: Run, stage: Stage, event: object, columns: Sequence[Column]) -> Row:
    row = row_of(columns, event)
    return {**row, "top5": None} if stage.name in run.few_classes else row


def stages_table(runs: Sequence[Run]) -> Table:
    columns = (
        RUN,
        STAGE,
        Column("from", "from"),
        Column("iterations", "iterations", "count"),
        _EPOCHS,
        Column("first_lr", "LR first", "rate"),
        Column("last_lr", "LR last", "rate"),
        Column("weight_decay", "decay", "rate"),
        Column("loss", "train loss", "loss", note="train loss: mean of the last 100 iterations"),
        *_RESULT,
        Column("gain", "gain", "points", note="gain: top-1 minus top-1 at its start, in percentage points"),
        Column("sent_bytes", "sent", "bytes", note="sent: by rank 0 in an iteration, on average"),
        _SPEED,
        _TIME,
        *(Column(name, name, "count", dull=0) for name in ("resumes", "skips", "rollbacks")),
        _STATE,
        *_CLASSES,
    )
    rows = []
    for run, stage, row in _stages(runs):
        row["state"] = run.state(stage)
        if stage.trained:
            rates, losses = stage.updates["lr"], stage.updates["loss"]
            row |= {"from": run.start(stage), "gain": run.gain(stage), "iterations": stage.iter}
            row |= {"first_lr": rates[0], "last_lr": rates[-1], "weight_decay": stage.updates["weight_decay"][0]}
            row = row_of(columns, stage, **row, loss=fmean(losses[-100:]), train_seconds=stage.seconds)
        rows.append(row | _scored(run, stage, stage.finished, (*_RESULT, *_CLASSES)))
    return Table("Stages", columns, rows)


def _stages(runs: Sequence[Run]) -> Iterator[tuple[Run, Stage, Row]]:
    """Yield each stage of the runs, and the beginning of its rows."""
    return ((run, stage, {"run": run.label, "stage": stage.name}) for run in runs for stage in run.history.stages)


def lives_table(runs: Sequence[Run]) -> Table:
    again = "repeated: iterations that a later life, `--redo` or a branch needed again"
    columns = (
        RUN,
        Column("number", "life", "count"),
        Column("began", "started (UTC)", "moment"),
        Column("start", "at"),
        Column("workers", "workers", "count"),
        Column("device", "device"),
        Column("updates", "iterations", "count"),
        Column("again", "repeated", "count", note=again),
        Column("seconds", "training", "time"),
        Column("end", "end"),
    )
    rows = [row_of(columns, life, run=run.label) for run in runs for life in run.history.lives]
    return Table("Process lives", columns, rows)


def epochs_table(runs: Sequence[Run]) -> Table:
    """Return a row for each epoch of a stage; an epoch across two stages has a row in each."""
    columns = (
        RUN,
        STAGE,
        Column("epoch", "epoch", "count", note="epoch: along the path of ancestors"),
        Column("lr", "LR", "rate"),
        Column("train_loss", "train loss", "loss"),
        Column("valid_accuracy", "valid accuracy", "percent"),
        Column("valid_loss", "valid loss", "loss"),
        Column("seconds", "time", "time"),
    )
    rows = []
    for _, stage, row in _stages(runs):
        tests = {epoch_number(stage.epoch(test.iter)): test for test in stage.tests if not test.ema}
        for number, part in stage.by_epoch():
            rates, losses, seconds = (stage.updates[name][part] for name in ("lr", "loss", "seconds"))
            row |= {"epoch": number, "lr": rates[-1], "train_loss": fmean(losses), "seconds": sum(seconds)}
            test = tests.get(number)
            rows.append(row | ({"valid_accuracy": test.top1, "valid_loss": test.loss} if test else {}))
    return Table("Epochs", columns, rows)


def iterations_table(runs: Sequence[Run]) -> Table:
    """Return a row for each displayed iteration and each evaluation."""
    columns = (
        RUN,
        STAGE,
        Column("iter", "iteration", "count"),
        Column("epoch", "epoch", "epochs"),
        Column("what", "what"),
        Column("lr", "LR", "rate"),
        Column("loss", "loss", "loss", note="loss: of an iteration's batch, before its update"),
        Column("images_per_s", "images/s", "speed"),
        _TOP1,
        _TOP5,
    )
    rows: list[Row] = []
    for run, stage, about in _stages(runs):
        lines: list[Row] = []
        for iter, lr, loss, images, seconds in stage.rows("iter", "lr", "loss", "images", "seconds"):
            if stage.displays(iter):
                line: Row = {"iter": iter, "epoch": stage.epoch(iter), "what": "train", "lr": lr, "loss": loss}
                lines.append(line | {"images_per_s": images / seconds if seconds else None})
        for test in stage.tests:
            what = "ema_test" if test.ema else "test"
            lines.append(_scored(run, stage, test, columns) | {"epoch": stage.epoch(test.iter), "what": what})
        rows += [line | about for line in sorted(lines, key=itemgetter("iter"))]
    return Table("Displayed iterations and evaluations", columns, rows)


# -- over seeds

_NO_RECIPE = ("seed", "solver.random_seed", FROM_ITER)
# Settings that change together with another.
_WITH = {"lr_policy": ("power", "gamma", "stepsize", "stepvalue", "lr_iter"), "from": ("ancestors",)}


def groups(runs: Sequence[Run]) -> list[list[Row]]:
    """Return the results of each stage and each ensemble, grouped by runs that are alike but for the seed."""
    alike: dict[str, list[Row]] = defaultdict(list)
    for name in dict.fromkeys(stage.name for run in runs for stage in run.history.stages):
        for run in runs:
            stage = run.history.stage(name)
            if stage is not None and stage.finished and not run.is_stale(stage):
                row = row_of(_SCORES, stage.finished, run=run.label, seed=run.seed(stage), gain=run.gain(stage))
                alike[name + str(facts(run, stage))].append({"stage": name, **row})
    for run in runs:
        for tested in run.ensembles:
            stages = [stage for member in tested.members if (stage := run.history.stage(point(member)[0]))]
            recipes = [facts(run, stage) for stage in stages]
            key = tested.name, tested.members, tested.rule, tested.shape, tested.batch_norm_iter, recipes
            about = {"stage": f"ensemble {tested.name}", "run": run.label, "test_loss": tested.loss}
            seeds = ", ".join(dict.fromkeys(run.seed(stage) for stage in stages))
            alike[str(key)].append(row_of(_SCORES, tested, **about, seed=seeds))
    return list(alike.values())


def facts(run: Run, stage: Stage) -> dict[str, str]:
    """Return what is equal for runs that differ by the seed alone: recipe, start and ancestors, number and transform of the test images.
    Without a snapshot the recipe is like no other."""
    recipes = []
    for step in run.path(stage):
        fields = run.identities.get(step.name, {"run": run.label}).items()
        recipes.append({k.removeprefix("solver."): v.strip('"') for k, v in sorted(fields) if k not in _NO_RECIPE})
    end = stage.finished
    tested = re.search(r"\d+ Transform\(.*\)$|$", end.tested_on if end else "", re.DOTALL)
    more = {"from": run.start(stage), "ancestors": str(recipes[1:]), "augmentation": end.augmentation if end else ""}
    return recipes[0] | more | {"tested": tested[0] if tested else ""}


def seeds_table(runs: Sequence[Run]) -> Table:
    """Return a row for each stage and ensemble, over the runs that are alike but for the seed. Runs of the same seed are not independent, and
    have no standard deviation."""
    columns = [Column("stage", "stage or ensemble"), Column("runs", "runs")]
    for score in _SCORES:
        columns.append(replace(score, key=f"{score.key}_mean"))
        spread = "spread" if score.kind in ("percent", "points") else score.kind
        columns.append(Column(f"{score.key}_sd", "sd" if score.kind != "time" else "", spread))
    columns += [Column("n", "n", "count", dull=1), Column("seeds", "seeds")]
    rows, same = [], []
    for group in groups(runs):
        name, seeds = str(group[0]["stage"]), [str(one["seed"]) for one in group]
        independent = len({*seeds}) == len(seeds)
        if not independent:
            same.append(name)
        row: Row = {"stage": name, "n": len(group), "seeds": listed(seeds, MOST)}
        row["runs"] = listed([str(one["run"]) for one in group], MOST)
        for key in (score.key for score in _SCORES):
            values = [float(value) for one in group if (value := one[key]) is not None]
            row[f"{key}_mean"] = fmean(values) if values else None
            row[f"{key}_sd"] = stdev(values) if len(values) > 1 and independent else None
        rows.append(row)
    notes = (f"no sd of {listed(same, MOST)}: runs of the same seed are not independent",) if same else ()
    return Table("Over seeds", columns, rows, ("sd: standard deviation over seeds (n - 1)", *notes))


def ranking_table(runs: Sequence[Run]) -> Table:
    """Return the rows of `seeds_table` that have a top-1, the best first."""
    table = seeds_table(runs)
    tested = [row for row in table.rows if row["top1_mean"] is not None]
    return replace(table, rows=sorted(tested, key=lambda row: -float(str(row["top1_mean"]))))


# -- the effect of a setting


def t95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t; from 10 on by Abramowitz and Stegun 26.7.5, off by less than 0.001."""
    if freedom < 10:
        return (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)[freedom - 1]
    return 1.959964 + 2.372271 / freedom + 2.822502 / freedom**2 + 2.555852 / freedom**3


def effect_table(runs: Sequence[Run], setting: str, across: str | None = None) -> Table:
    """Compare the stages of each run that are alike but for `setting` with the stages of its first value; the 95 % interval is over the runs'
    mean differences. UsageError if no two stages differ in `setting` alone."""
    matched = [(run.label, *group) for run in runs for group in _matched(run, setting, across)]
    base = next((value for *_, tops in matched if len(tops) > 1 for value in tops), None)
    if base is None:
        raise UsageError(
            f"no two finished stages of a run differ in {setting} alone",
            "`stagerun plan DIR` shows what stages change; `report --by stage` what they came to",
        )
    pairs: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for run, other, tops in matched:
        for value, top1 in tops.items() if base in tops else ():
            if value != base:
                pairs[other, value][run].append((top1, top1 - tops[base]))
    independent = len({str([run.seed(stage) for stage in run.history.stages]) for run in runs}) == len(runs)
    rows: list[Row] = []
    for other, value in sorted(pairs, key=lambda key: [*map(_size, key)]):
        by_run = pairs[other, value].values()
        levels, means = ([fmean(pair[side] for pair in of_run) for of_run in by_run] for side in (0, 1))
        n, mean = len(means), fmean(means)
        row: Row = {"across": other, "value": value, "top1": fmean(levels), "difference": mean, "runs": n}
        if n > 1 and independent:
            half = t95(n - 1) * stdev(means) / n**0.5
            row |= {"low": mean - half, "high": mean + half}
        rows.append({**row, "pairs": sum(map(len, by_run))})
    note = "difference: of top-1, in percentage points, between matched stages"
    columns = (
        Column("across", across or ""),
        Column("value", setting),
        _TOP1,
        Column("difference", "difference", "points", note=note),
        Column("low", "95 % from", "points", note="95 %: Student's t over the runs' means"),
        Column("high", "to", "points"),
        Column("pairs", "pairs", "count"),
        Column("runs", "runs", "count"),
    )
    notes = () if independent else ("no interval: runs of the same seed are not independent",)
    return Table(f"Effect of {setting}, against {base}", columns, rows, notes)


def _size(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return float("inf")


def _matched(run: Run, setting: str, across: str | None) -> list[tuple[str, dict[str, float]]]:
    """Return the groups of stages that are alike but for `setting`: the value of `across`, and top-1 by the value of `setting`."""
    alike: dict[str, tuple[str, dict[str, float]]] = {}
    for stage in run.history.stages:
        top1 = stage.finished.top1 if stage.finished and not stage.left_out and not run.is_stale(stage) else None
        if top1 is not None:
            recipe = facts(run, stage)
            others = str({key: value for key, value in recipe.items() if not _belongs(key, setting)})
            group = recipe.get(across, "(none)") if across else ""
            alike.setdefault(others, (group, {}))[1][recipe.get(setting, "(none)")] = top1
    return list(alike.values())


def _belongs(key: str, setting: str) -> bool:
    """Return whether a field is part of a setting, or changes with it."""
    if setting == "augmentation":
        return key == setting or key.startswith("transform_param")
    return key == setting or key in _WITH.get(setting, ()) or (key == "augmentation" and "transform" in setting)
