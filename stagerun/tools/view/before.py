"""What the page shows of a schedule before it is trained: mistakes and findings, the plan, a stage and its settings. Pure."""

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from stagerun.base.errors import Problem, RecipeError, Span, StagerunError
from stagerun.base.recipe import Schedule
from stagerun.base.snapshots import Inventory
from stagerun.base.text import count, duration
from stagerun.drawing.picture import Picture
from stagerun.plan import Plan, State, make_plan
from stagerun.plan.ensembles import PlannedEnsemble, ensembles_costs, ensembles_rows
from stagerun.plan.hours import Hours, Spent, left
from stagerun.plan.render import details, table_rows, title
from stagerun.tools.diff.command import Difference, FieldDifference, Found, value_text, verdict
from stagerun.tools.plan.why import settings_of, start_text
from stagerun.tools.view.sections import Cell, cell, paragraphs, problem, section, stage_link, table, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """A schedule without mistakes, and what `plan` says of it. `blocks`: where an allocation ends. `hours` is None
    where nothing was measured. `compared`: with another schedule. `stored`: it was read from a snapshot, and where its settings were
    written is not known."""

    schedule: Schedule
    plan: Plan
    picture: Picture
    findings: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    ensembles: tuple[PlannedEnsemble, ...] = ()
    blocks: tuple[str, ...] = ()
    hours: Hours | None = None
    together: Mapping[str, Spent | None] | None = None
    compared: Found | None = None
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
        hint = f'<p class="hint">hint: {text(error.hint)}</p>' if error.hint else ""
        items = [f'<article class="mistake"><p><strong>{text(error.message)}</strong></p>{hint}</article>']
    note = "what is below is the last version without any" if last is not None else ""
    return section(count(max(1, len(found)), "mistake"), "\n".join(items), note=note)


def findings(before: Before | None) -> str:
    """What is legal and looks wrong, and what is worth knowing."""
    if before is None:
        return ""
    at = stages_at(before.schedule)
    items = [problem(one, at(one.span), "finding") for one in before.findings]
    items += [f'<article class="remark"><p>note: {text(note)}</p></article>' for note in before.notes]
    if not items:
        return ""
    known = count(len(before.findings), "finding") if before.findings else "no findings"
    said = _summary(f"{known}, {count(len(before.notes), 'note')}")
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


def plan(before: Before | None, running: Mapping[str, float] | None = None) -> str:
    """The table of `plan`, with the hours of each stage where they are known. `running`: the seconds left of a run that goes on."""
    if before is None:
        return ""
    head, *rows = table_rows(before.plan)
    parts = {**left(before.plan, before.hours), **(before.together or {})} if before.hours else {}
    parts = {name: Spent(training=seconds) for name, seconds in (running or {}).items()} or parts
    heads = [*head[:-1], *["time left"] * bool(parts), head[-1]]
    made = [_plan_row(row, parts, before) for row in rows]
    lead = [f"<p>{text(title(before.plan))}</p>"]
    if before.stored:  # what runs have done of it stands in their report
        heads, made = heads[:-1], [cells[:-1] for cells in made]
    else:
        lead.append("" if running else _time(before, parts))  # the run itself says how long it takes
    foot = [f"<pre>{text(block)}</pre>" for block in before.blocks if block]
    if before.ensembles:
        titles, *members = ensembles_rows(before.ensembles)
        cells = [[cell(word) for word in row] for row in members]
        foot.append(table("planned", "The ensembles of the plan", titles, cells))
        foot.append(paragraphs(ensembles_costs(before.ensembles)))
    if before.hours is not None:
        counted = [f"not counted: {', '.join(before.hours.left_out)}"] if before.hours.left_out else []
        foot.append(paragraphs([*counted, *before.hours.notes]))
    return section("Plan", "".join([*lead, table("stages", "The stages of the plan", heads, made, foot=1), *foot]))


def _time(before: Before, parts: Mapping[str, Spent | None]) -> str:
    """The line on how long it takes."""
    known = [part for part in parts.values() if part is not None]
    if before.hours is None or not known:
        nothing = before.hours is None and any(s.state is not State.DONE for s in before.plan.stages)
        return paragraphs(["how long it takes is not known: nothing was measured here"] if nothing else [])
    whole = sum(known, Spent(start=before.hours.opening))
    if not math.isfinite(whole.total):
        return paragraphs(["how long it takes is not known: the log says nothing sensible"])
    return f"<p>about <strong>{text(duration(whole.total))}</strong> left {text(before.hours.source)}</p>"


def _plan_row(row: Sequence[str], parts: Mapping[str, Spent | None], before: Before) -> list[Cell]:
    name, *words, state = row
    known = [part for part in parts.values() if part is not None] if name == "total" else [parts.get(name)]
    seconds = [part.total for part in known if part is not None and math.isfinite(part.total)]  # a log may say anything
    cells = [Cell(stage_link(name)) if name in before.stages else cell(name)]
    cells += [cell(word, number=n in (1, 2)) for n, word in enumerate(words)]
    cells += [cell(duration(sum(seconds)) if seconds else "", number=True)] * bool(parts)
    return [*cells, cell(state)]


# -- a stage


def meant(before: Before, name: str) -> tuple[Before, str] | None:
    """The schedule and the stage that a name in the picture means: of two schedules, `B cyc1` is the second's. None where there is no such stage."""
    side, _, own = name.rpartition(" ")
    if side and before.compared is not None:
        name = own
        if side == "B":
            schedule = before.compared.b.schedule
            before = replace(before, schedule=schedule, plan=make_plan(schedule, Inventory()), stored=False)
    return (before, name) if name in before.stages else None


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


def images(stage: str, refusal: str) -> str:
    """A button for what its network gets to see, or why there is none."""
    if refusal:
        return f"<h3>Images</h3>{paragraphs([refusal])}"
    button = f'<button type="button" data-images="{text(stage)}">Show some of its images</button>'
    return f'<h3>Images</h3>{button}<p aria-live="polite"></p>'


# -- two schedules


def compared(before: Before | None) -> str:
    """In what two schedules differ, as `diff` says it."""
    if before is None or before.compared is None:
        return ""
    found = before.compared
    differs = found.difference
    lead = [f"A is {found.a.label} ({found.a.what}), B is {found.b.label} ({found.b.what})"]
    lead += [f"{name}: only in A" for name in differs.only_a] + [f"{name}: only in B" for name in differs.only_b]
    lead += map(str, differs.longer)
    trains = any(f.trains for f in differs.fields) or bool(differs.only_a or differs.only_b)
    body = paragraphs([verdict(differs, trains)], "lead") + paragraphs(lead, "plain")
    if differs.fields:
        head = ["stage", "field", "A", "B", "changes training"]
        body += table("differences", "Settings that differ", head, _alike(differs), sorted_by=True)
    return section("Two schedules", body)


def _alike(differs: Difference) -> list[list[Cell]]:
    """A row for each difference, or for several stages that differ alike; what trains comes first."""
    alike: dict[tuple[object, ...], list[FieldDifference]] = {}
    for one in sorted(differs.fields, key=lambda f: not f.trains):
        alike.setdefault((one.field, one.a, one.b, one.trains), []).append(one)
    rows = []
    for (first, *_), same in ((found, found) for found in alike.values()):
        names = ", ".join(one.stage for one in same) or "the schedule"
        words = (names, first.field, value_text(first.a), value_text(first.b), "yes" if first.trains else "no")
        rows.append([cell(word) for word in words])
    return rows
