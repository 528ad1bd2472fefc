"""What the page shows of a schedule before it is trained: mistakes and findings, the plan, a stage and its settings. Pure."""

import posixpath
from collections.abc import Callable
from dataclasses import dataclass

from stagerun.base.errors import Level, Problem, RecipeError, Span, StagerunError
from stagerun.base.recipe import Schedule
from stagerun.base.text import columns, count
from stagerun.drawing.picture import Picture
from stagerun.plan import Plan
from stagerun.plan.render import details, table_rows, title
from stagerun.tools.plan.why import settings_of, start_text
from stagerun.tools.view.sections import Cell, cell, problem, section, table, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A schedule without mistakes, and what `plan` says of it. `blocks`: what it says beside its table, of time and ensembles. `stored`: it
    was read from a snapshot, and where its settings were written is not known."""

    schedule: Schedule
    plan: Plan
    picture: Picture
    findings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    stored: bool = False

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.schedule.stages)


# -- what is wrong


def wrong(error: StagerunError | None, last: Schedule | None) -> str:
    """Mistakes, in place of the plan or above that of the `last` version without any."""
    if error is None:
        return ""
    found = error.problems if isinstance(error, RecipeError) else ()
    at = stages_at(last)
    items = [problem(one, at(one.span)) for one in found]
    if not items:
        items = [f'<article class="mistake"><pre>{text(error.render())}</pre></article>']
    note = "what is below is the last version without any" if last is not None else ""
    return section(count(max(1, len(found)), "mistake"), "\n".join(items), note=note)


def findings(before: Before | None) -> str:
    """What is legal and looks wrong, and what is worth knowing."""
    if before is None:
        return ""
    at = stages_at(before.schedule)
    warnings = [one for one in before.findings if one.level is Level.WARNING]
    noted = [one.head for one in before.findings if one.level is Level.NOTE]
    noted += [f"note: {note}" for note in before.notes]
    items = [problem(one, at(one.span), "finding") for one in warnings]
    items += [f'<article class="remark"><p>{text(note)}</p></article>' for note in noted]
    if not items:
        return ""
    known = count(len(warnings), "warning") if warnings else "no warnings"
    said = _summary(f"{known}, {count(len(noted), 'note')}")
    body = f'<details open id="found">{said}{"".join(items)}</details>'
    return section("Worth a look", body)


def _summary(words: str) -> str:
    return f"<summary>{text(words)}</summary>"


def stages_at(schedule: Schedule | None) -> Callable[[Span], str]:
    """Says which stage a place in the files belongs to; '' where that is several or none of them."""
    stages = schedule.stages if schedule is not None else ()
    users: dict[str, set[str]] = {}  # of a file, other than the one that the stage itself stands in
    for stage in stages:
        for path in {one.span.path for one in stage.origins.values() if one.span is not None} - {stage.span.path}:
            users.setdefault(path, set()).add(stage.name)

    def at(span: Span) -> str:
        if names := users.get(span.path):
            return next(iter(names)) if len(names) == 1 else ""  # a file may be that of several
        above = [s for s in stages if s.span.path == span.path and s.span.line <= span.line]
        return above[-1].name if above else ""

    return at


# -- the plan


def plan(before: Before | None, alive: bool = False) -> str:
    """The table of `plan`, and what it says beside it; a run that is `alive` says itself how long it takes."""
    if before is None:
        return ""
    rows = table_rows(before.plan)
    if before.stored:  # what runs have done of it stands in their report
        rows = [row[:-1] for row in rows]
    blocks = [title(before.plan), "\n".join(columns(rows)), *(() if alive else before.blocks)]
    return section("Plan", f"<pre>{text(chr(10).join(f'{block}{chr(10)}' for block in blocks if block))}</pre>")


# -- a stage


def detail(before: Before, name: str) -> str:
    """What a stage changes, and where each of its settings came from."""
    schedule = before.schedule
    stage, planned = schedule.stage(name), next(p for p in before.plan.stages if p.stage.name == name)
    parent = schedule.stage(stage.parent) if stage.parent is not None else None
    was = {s.name: s.value for s in settings_of(schedule, parent)} if parent is not None else {}
    found = list(settings_of(schedule, stage))
    head, rows = ["field", "value"], []
    head += [f"in {parent.name}"] if parent is not None else []
    head += [] if before.stored else ["from"]
    folder = posixpath.dirname(schedule.files[0][0]) + "/" if schedule.files else ""
    for one in found:
        changed = parent is not None and was.get(one.name) != one.value
        before_it = [cell(was.get(one.name, "") if changed else "")] if parent is not None else []
        value = Cell(f"<strong>{text(one.value)}</strong>") if changed else cell(one.value)
        if one.place:
            rows.append(
                [cell(one.name), value, *before_it, *([] if before.stored else [cell(one.place.removeprefix(folder))])]
            )
    defaults = [[cell(one.name), cell(one.value)] for one in found if not one.place]
    lines = [line.strip() for line in details(before.plan, planned).split("\n")]
    start = start_text(stage).removeprefix(f"{name}: ")
    start = start.rpartition(" (")[0] if before.stored else start
    return "".join(
        [
            f'<h2 id="chosen">{text(name)}</h2>',
            f"<p>{text(start)}</p>",
            f"<ul>{''.join(f'<li>{text(line)}</li>' for line in lines)}</ul>",
            table(
                "settings",
                f"Settings of {name} that {'differ from their defaults' if before.stored else 'are written somewhere'}",
                head,
                rows,
            ),
            f'<details id="defaults">{_summary(count(len(defaults), "default"))}'
            f"{table('default', f'Defaults of {name}', ['field', 'value'], defaults)}</details>",
        ]
    )
