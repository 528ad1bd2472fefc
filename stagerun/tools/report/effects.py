"""What a setting does: differences between stages of a run that are alike but for it, with intervals over runs. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence

from stagerun.base.errors import UsageError
from stagerun.base.text import listed
from stagerun.tools.report.compare import recipe_but_seeds, settings
from stagerun.tools.report.history import Run, StageHistory
from stagerun.tools.report.table import Column, Table, Value

# Student's t, 97.5 %, by degrees of freedom from 1 on.
_T95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)

# What changes together with a setting, so that stages that differ in these as well are still alike but for it.
_WITH = {
    "lr_policy": ("power", "gamma", "stepsize", "stepvalue", "lr_iter"),
    "from": ("ancestors",),
}


def t95(freedom: int) -> float:
    """The 97.5 % quantile of Student's t. Beyond the table: Abramowitz and Stegun 26.7.5, off by less than 0.001."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, n = 1.9599640, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def interval(values: Sequence[float], twins: Sequence[str] = ()) -> tuple[float, float | None, float | None]:
    """Return the mean of one value for each run, and the ends of its 95 % interval by Student's t; without them for a single run, or where there
    are `twins`."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1 or twins:
        return mean, None, None
    half = t95(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half


def _twins(runs: Sequence[Run]) -> tuple[str, ...]:
    """Labels of runs that trained the same from the same seeds: they say nothing about what another seed would give."""
    found: dict[object, list[str]] = {}
    for run in runs:
        if seeds := tuple((s.name, run.seed(s), recipe_but_seeds(run, s)) for s in run.history.stages if run.seed(s)):
            found.setdefault(repr(seeds), []).append(run.label)
    return next((tuple(labels) for labels in found.values() if len(labels) > 1), ())


def _said_of(rows: Sequence[Sequence[Value]], twins: Sequence[str]) -> str:
    """On the intervals, if any row has several runs."""
    if not any(isinstance(runs, int) and runs > 1 for *_, runs in rows):
        return ""
    if twins:
        return f"no intervals: {listed(twins, 3)} trained the same from the same seed, and an interval is over seeds"
    return "95 %: Student's t over the runs' means"


_End = tuple[Mapping[str, str], float]  # what a finished stage was made with, and top-1


def _ends(run: Run) -> Iterator[_End]:
    for stage in run.history.stages:
        if stage.finished and stage.finished.top1 is not None and not stage.left_out and stage.name not in run.stale:
            yield _facts(run, stage), stage.finished.top1


def _facts(run: Run, stage: StageHistory) -> dict[str, str]:
    assert stage.finished
    path = run.path(stage)
    above = repr(recipe_but_seeds(run, path[1])) if len(path) > 1 else ""
    made = {field: value.strip('"') for field, value in settings(run, stage).items()}
    return made | {"ancestors": above, "augmentation": stage.finished.augmentation}


def _belongs(field: str, setting: str) -> bool:
    """Whether a field says part of what `setting` says, or goes with it."""
    if setting == "augmentation":
        return field == setting or field.startswith("transform_param")
    return field == setting or field in _WITH.get(setting, ()) or (field == "augmentation" and "transform" in setting)


def _in_order(values: Sequence[str]) -> list[str]:
    """By size where all are numbers, else as they first came."""
    found = list(dict.fromkeys(values))
    try:
        return sorted(found, key=float)
    except ValueError:
        return found


def effect_table(runs: Sequence[Run], setting: str, across: str | None = None, against: str | None = None) -> Table:
    """A row for each value of `setting` but the one it is compared with, and for each value of `across`.

    Within a run, stages that are alike in all else are matched; the mean of their differences is the run's number, and the
    interval is over runs. Raises UsageError where no two stages differ in `setting` alone.
    """
    ends, twins = [list(_ends(run)) for run in runs], _twins(runs)
    of_runs = [_matched(found, setting, across) for found in ends]
    values = [value for matched in of_runs for _, group in matched if len(group) > 1 for value in group]
    base = against if against is not None else next(iter(values), "")
    rows: list[tuple[Value, ...]] = []
    for place in _in_order([place for matched in of_runs for place, _ in matched]):
        for value in _in_order(values):
            pairs = [
                [
                    (group[value], group[base])
                    for at, group in matched
                    if at == place and value in group and base in group
                ]
                for matched in of_runs
            ]
            pairs = [found for found in pairs if found]
            if value == base or not pairs:
                continue
            found = interval([math.fsum(a - b for a, b in of_run) / len(of_run) for of_run in pairs], twins)
            level = math.fsum(math.fsum(a for a, _ in of_run) / len(of_run) for of_run in pairs) / len(pairs)
            count = sum(len(of_run) for of_run in pairs)
            rows.append((place, value, level, *found, count, len(pairs)))
    if not rows:
        every = [facts for found in ends for facts, _ in found]
        known = sorted({field for facts in every for field in facts} - {"ancestors"})
        varied = [field for field in known if len({facts.get(field) for facts in every}) > 1]
        raise UsageError(
            f"no two finished stages of a run differ in {setting} alone"
            + (f", one of them with {against}" if against is not None else ""),
            f"settings that differ between stages: {', '.join(varied) or 'none'}",
        )
    note = f"difference: top-1 against {setting} {base}, in percentage points, between stages of the same run that are alike in all else"
    columns = (Column("across", across or "", "text"), Column("value", setting, "text"), *_NUMBERS)
    said = tuple(filter(None, (note, _said_of(rows, twins))))
    return Table(f"Effect of {setting}, against {base}", columns, tuple(rows), said)


_NUMBERS = (
    Column("top1", "top-1", "percent"),
    Column("difference", "difference", "points"),
    Column("low", "95 % from", "points"),
    Column("high", "to", "points"),
    Column("pairs", "pairs", "count"),
    Column("runs", "runs", "count"),
)


def _matched(ends: Sequence[_End], setting: str, across: str | None) -> list[tuple[str, dict[str, float]]]:
    """Groups of stages that are alike but for `setting`: the value of `across`, and top-1 by the value of `setting`."""
    groups: dict[frozenset[tuple[str, str]], tuple[str, dict[str, float]]] = {}
    for facts, top1 in ends:
        alike = frozenset((field, value) for field, value in facts.items() if not _belongs(field, setting))
        place = facts.get(across, "(none)") if across else ""
        groups.setdefault(alike, (place, {}))[1][facts.get(setting, "(none)")] = top1
    return list(groups.values())
