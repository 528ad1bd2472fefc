"""The page: HTML of its sections, and the document that holds them, served or as one file. Text goes into it through `text` only. Pure."""

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

import stagerun
from stagerun.base.errors import Level, RecipeError, StagerunError
from stagerun.base.table import Table, notes_of, shown
from stagerun.base.text import columns, count, duration
from stagerun.base.text import shown as printable
from stagerun.look.chart import chart, stylesheet
from stagerun.look.folders import Folders, Planned
from stagerun.look.report import all_tables
from stagerun.look.runs import Run
from stagerun.look.tables import ranking_table
from stagerun.plan.render import details, table_rows, title
from stagerun.tools.status import Status, headline, status_text
from stagerun.tools.why import explained

# In the order of the page.
SECTIONS = ("mistakes", "run", "picture", "ranking", "plan", "findings", "report")
MOST_ROWS, FOLDED_ROWS = 500, 24  # rows that are shown, and rows from which a table is folded
SIGNS = {"running": ("good", "\N{BLACK CIRCLE}"), "finished": ("good", "\N{CHECK MARK}")}
SIGNS |= dict.fromkeys(("failed", "killed", "error"), ("bad", "\N{MULTIPLICATION SIGN}"))

# Nothing is loaded from elsewhere, no script runs but the page's, and no other page may frame it.
_NO_FORMS = "base-uri 'none'; form-action 'none'"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"{_NO_FORMS}; frame-ancestors 'none'"
)


def render(folders: Folders) -> dict[str, str]:
    """Return the HTML of each section; an empty one is hidden."""
    planned, outputs, now = folders.planned, folders.outputs, time.time()
    runs = [one.run for one in outputs if one.run is not None]
    states = [_state("error", f"{one.label}: {one.error}") for one in outputs if one.error]
    html = dict.fromkeys(SECTIONS, "")
    if len(outputs) == 1 and (status := outputs[0].status) is not None:
        states.append(_state(status.state, headline(status, now)))
        html["run"] = _run(status, now)
    if folders.error is not None:
        kind, html["mistakes"] = _mistakes(folders.error, planned)
        states.insert(0, _state("error", kind))
    if planned is not None:
        drawn = chart(planned.picture, runs)
        html["picture"] = f'<h2 class="unseen">Chart</h2><div class="frame">{drawn}<div id="values"></div></div>'
        html["plan"] = _plan(planned, any(run.alive for run in runs))
        html["findings"] = _findings(planned)
    elif folders.error is None:
        html["picture"] = paragraphs(["no snapshot says yet what is trained"])
    if any(stage.finished for run in runs for stage in run.history.stages):
        html["ranking"] = _section("Ranking", _table("ranked", ranking_table(runs)))
    if runs:
        html["report"] = _report(runs)
    return {"head": f"<h1>{text(folders.title)}</h1>{''.join(states)}", **html}


def bug(error: Exception) -> dict[str, str]:
    """Return the section for an exception in `render`."""
    note = f"this is a bug of stagerun: {type(error).__name__}: {error}; the command has printed where"
    return {"mistakes": _section("The page could not be updated", paragraphs([note], "bad"))}


# -- pieces


def text(words: object) -> str:
    """Escape words for an HTML text or an attribute in double quotes."""
    return escape(printable(str(words)))


def paragraphs(lines: Iterable[str], kind: str = "note") -> str:
    return "".join(f'<p class="{kind}">{text(line)}</p>' for line in lines)


def _state(state: str, words: str) -> str:
    kind, sign = SIGNS.get(state, ("quiet", "\N{BLACK SQUARE}"))
    return f'<p class="state {kind}"><span aria-hidden="true">{sign}</span> {text(words)}</p>'


def _section(heading: str, body: str, note: str = "") -> str:
    return f"<h2>{text(heading)} <small>{text(note)}</small></h2>\n{body}"


def _folded(id: str, summary: str, body: str, attribute: str = "") -> str:
    return f'<details id="{id}"{attribute}><summary>{text(summary)}</summary>{body}</details>'


def _preformatted(blocks: Iterable[str]) -> str:
    return "".join(f"<pre>{text(block)}</pre>" for block in blocks if block)


def _table(id: str, table: Table) -> str:
    """Return a table of `report`. page.js sorts it, and makes links of the names of stages."""
    heads, rows = shown(table)
    kinds = ["text" if column.kind == "text" else "number" for column in heads]
    html = "".join(
        f'<th scope="col" class="{kind}"><button type="button">{text(column.title)}</button></th>'
        for column, kind in zip(heads, kinds, strict=True)
    )
    body = ""
    for row in rows[:MOST_ROWS]:
        cells = (f'<td class="{kind}">{text(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))
        body += f"<tr>{''.join(cells)}</tr>\n"
    more = [f"and {len(rows) - MOST_ROWS} more rows"] if len(rows) > MOST_ROWS else []
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.title)}"><table id="{id}">\n'
        f"<thead><tr>{html}</tr></thead>\n<tbody>{body}</tbody></table></div>" + paragraphs([*more, *notes_of(table)])
    )


# -- the schedule


def _mistakes(error: StagerunError, last: Planned | None) -> tuple[str, str]:
    """Return their number in words, and the section."""
    problems = [one.render() for one in error.problems] if isinstance(error, RecipeError) else [error.render()]
    number = count(len(problems), "mistake")
    note = "what is below is the last version without any" if last is not None else ""
    return number, _section(number, _articles("mistake", problems), note)


def _articles(kind: str, items: Iterable[str]) -> str:
    return "".join(f'<article class="{kind}"><pre>{text(item)}</pre></article>' for item in items)


def _findings(planned: Planned) -> str:
    warnings = [one.render() for one in planned.findings if one.level is Level.WARNING]
    remarks = [one.head for one in planned.findings if one.level is Level.NOTE]
    remarks += [f"note: {note}" for note in planned.notes]
    if not warnings and not remarks:
        return ""
    summary = f"{count(len(warnings), 'warning') if warnings else 'no warnings'}, {count(len(remarks), 'note')}"
    items = f'{_articles("finding", warnings)}<article class="remarks">{paragraphs(remarks, "")}</article>'
    return _section("Worth a look", _folded("findings-list", summary, items, " open"))


def _plan(planned: Planned, alive: bool) -> str:
    """Show what `plan` prints. A run that is `alive` shows the time left itself."""
    rows = table_rows(planned.plan)
    if planned.stored:  # the report has the states of stages
        rows = [row[:-1] for row in rows]
    table = "\n".join(columns(rows))
    return _section("Plan", _preformatted([title(planned.plan), table, *([] if alive else planned.blocks)]))


def detail(planned: Planned, name: str) -> str:
    """Show what `plan` says of a stage, and `plan --why`: each setting, and where it was written, which a snapshot doesn't say."""
    stage = next(one for one in planned.plan.stages if one.stage.name == name)
    lines = "".join(f"<li>{text(line.strip())}</li>" for line in details(planned.plan, stage).split("\n"))
    settings = "" if planned.stored else explained(planned.plan.schedule, name)
    return f"<h2>{text(name)}</h2><ul>{lines}</ul>{_preformatted([settings])}"


# -- runs


def _run(status: Status, now: float) -> str:
    """Show large figures, and what `status` prints."""
    figures, progress = dict[str, str](), status.progress
    if status.state == "nothing":
        return ""
    if progress is not None and status.state != "finished":
        figures["stage"] = f"{progress.stage} ({progress.number} of {progress.stages})"
        figures["iteration"] = f"{progress.iter} of {progress.max_iter}"
        for name, value, form in (
            ("epoch", progress.epoch, "{:.2f}".format),
            ("learning rate", progress.lr, "{:.4g}".format),
            ("loss", progress.loss, "{:.4f}".format),
            ("images/s", progress.images_per_second, "{:.0f}".format),
            ("left in stage", progress.seconds_left_in_stage, duration),
            ("left in all", progress.seconds_left, duration),
        ):
            if value is not None:
                figures[name] = form(value)
    html = "".join(f"<div><dt>{name}</dt><dd>{text(value)}</dd></div>" for name, value in figures.items())
    return _section("Run", f'<dl class="figures">{html}</dl>{_preformatted([status_text(status, now)])}')


def _report(runs: Sequence[Run]) -> str:
    """Show the tables of `report`."""
    html = ""
    for n, table in enumerate(all_tables(runs)):
        body = _table(f"report{n}", table)
        if n > 1 and len(table.rows) > FOLDED_ROWS:
            body = _folded(f"fold{n}", count(len(table.rows), "row"), body)
        html += f"<h3>{text(table.title)}</h3>{body}"
    if remarks := [note for run in runs for note in run.notes()]:
        html += _folded("notes", count(len(remarks), "note"), paragraphs(remarks))
    return _section("Report", html)


# -- the document


def file_text(name: str) -> str:
    return files("stagerun.look").joinpath(name).read_text(encoding="utf-8")


def document(folders: Folders, sections: Mapping[str, str], head: str, foot: str = "") -> str:
    """Return the page. `head`: links to its style and script; `foot`: what else it needs as one file."""
    parts = [f'<section id="{id}"{"" if sections[id] else " hidden"}>{sections[id]}</section>' for id in SECTIONS]
    return Template(file_text("page.html")).substitute(
        title=text(folders.title), head=head, heading=sections["head"], sections="\n".join(parts), foot=foot,
        stagerun=text(stagerun.__version__),
    )  # fmt: skip


def saved(folders: Folders) -> str:
    """Return the page as one file that loads nothing."""
    style, script = stylesheet() + file_text("page.css"), file_text("page.js")
    digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (style, script))
    policy = "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; img-src data:; ".format(*digests)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}{_NO_FORMS}">\n<style>{style}</style>'
    details = ""
    if (planned := folders.planned) is not None:
        for stage in planned.plan.schedule.stages:
            details += f'<div hidden data-detail="{text(stage.name)}">{detail(planned, stage.name)}</div>'
    return document(folders, render(folders), head, f"{details}\n<script>{script}</script>")
