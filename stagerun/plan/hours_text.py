"""Hours and budgets as text and JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from stagerun.plan.budget import MOST, Budget
from stagerun.plan.hours import Hours, Spent, left
from stagerun.plan.plan import Plan
from stagerun.text import columns, count, duration


def render_hours(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> str:
    """How long what is left takes, one line per stage, and per ensemble of `together`; '' if nothing is left."""
    parts = {**left(plan, hours), **(together or {})}
    known = [part for part in parts.values() if part is not None]
    unknown = [name for name, part in parts.items() if part is None]
    if not known:
        return f"stage {', '.join(unknown)} {hours.unknown}" if unknown else ""
    whole = sum(known, Spent(start=hours.opening))
    some = f" without {', '.join(unknown)}" if unknown else ""
    lines = [f"about {duration(whole.total)} left{some} {hours.source}", ""]
    shown = [n for n in ("training", "tests", "snapshots", "start") if getattr(whole, n)]
    titles = {"training": "training", "tests": "evaluation", "snapshots": "snapshots", "start": "start"}
    rows: list[Sequence[str]] = [("stage", "iterations", *(titles[n] for n in shown), "in all")]
    iterations = {p.label: p.iterations_left for p in plan.work}
    if hours.opening:
        rows.append(("(the job)", "", *("" for n in shown[:-1]), *[duration(hours.opening)] * 2))
    for name, part in parts.items():
        times = ["?"] * (len(shown) + 1) if part is None else _times(part, shown)
        rows.append((name, str(iterations.get(name, "")), *times))
    rows.append(("total", str(sum(iterations.values())), *_times(whole, shown)))
    lines += columns(rows)
    lines += [f"stage {', '.join(unknown)} {hours.unknown}"] if unknown else []
    lines += [f"not counted: {', '.join(hours.left_out)}"] if hours.left_out else []
    return "\n".join([*lines, *hours.notes])


def _times(part: Spent, shown: Sequence[str]) -> list[str]:
    return [*(duration(getattr(part, name)) for name in shown), duration(part.total)]


def hours_record(plan: Plan, hours: Hours, together: Mapping[str, Spent | None] | None = None) -> dict[str, object]:
    """The same for `--json`, in seconds; a stage of which nothing is known has none."""
    parts = {**left(plan, hours), **(together or {})}
    known = [part for part in parts.values() if part is not None]
    return {
        "source": hours.source,
        "stages": [{"stage": name, **(_record(part) if part else {})} for name, part in parts.items()],
        "opening": hours.opening,
        "left": _record(sum(known, Spent(start=hours.opening if parts else 0.0))),
        "not_counted": list(hours.left_out),
        "notes": list(hours.notes),
    }


def _record(part: Spent) -> dict[str, object]:
    return {**asdict(part), "in_all": part.total}


def render_budget(found: Budget) -> str:
    """Where an allocation of that length ends, and what follows."""
    if not found.total:
        return "nothing is left that an allocation would be for"
    if found.done:
        return f"an allocation of {duration(found.seconds)} is enough: all is done after {duration(found.total)}"
    done = f", after {', '.join(found.finished)}" if found.finished else ""
    ends = f"an allocation of {duration(found.seconds)} ends in"
    if found.testing:
        lines = [f"{ends} the evaluation of {found.stage or 'the ensembles'}{done}"]
        lines.append(f"  {f'{found.stage} is saved by then, and' if found.stage else 'which'} is evaluated again")
    else:
        lines = [f"{ends} {found.stage}, at iteration {found.iter} of {found.last} (epoch {found.epoch:.2f}){done}"]
        saved = f"{found.saved_stage} at {found.saved_iter}" if found.saved_stage else "the seed"
        lines.append(
            f"  told to stop before (SIGTERM, SIGUSR1): saves {found.stage} at iteration {found.stop_iter}, and nothing is lost"
        )
        lines.append(
            f"  killed: the last snapshot by then is {saved}; {count(found.lost, 'iteration')}, "
            f"{duration(found.lost_seconds)}, are trained again"
            if found.saved_stage
            else f"  killed: there is no snapshot by then; it begins again from the seed, {duration(found.lost_seconds)} lost"
        )
    return "\n".join([*lines, f"  {_allocations(found)}"])


def _allocations(found: Budget) -> str:
    length = duration(found.seconds)
    if found.allocations is None:
        short = "too short for a start and what is next, an iteration and its snapshot or an evaluation"
        return f"with {length} each it gets nowhere: {short}"
    times = _number(found.allocations)
    text = f"{times} allocations of {length} in all: the same command goes on where the last one ended"
    if found.killed_allocations is None:
        return text + "; if each is killed, it never gets beyond its last snapshot: set a smaller `snapshot`"
    if found.killed_allocations != found.allocations:
        return text + f"; {_number(found.killed_allocations)} if each is killed"
    return text


def _number(allocations: int) -> str:
    return str(allocations) if allocations <= MOST else f"more than {MOST}"


def budget_record(found: Budget) -> dict[str, object]:
    return asdict(found)
