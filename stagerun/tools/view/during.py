"""What the page shows of a run, and of several: how far it is, what has happened, what came out. Pure."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from stagerun.base.pace import DONE, STALE
from stagerun.base.text import count, duration
from stagerun.tools.report.command import all_tables
from stagerun.tools.report.compare import differences_table, lead, ranking_table
from stagerun.tools.report.history import Run, notes
from stagerun.tools.status.command import headline, status_text
from stagerun.tools.status.look import Status
from stagerun.tools.view.sections import cell, paragraphs, progress, report_table, section, stage_link, table, text

MOST_EVENTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An output folder. `run` is None before anything has been logged, `status` where the log of one of many says enough. `error` says why
    the folder can't be read."""

    label: str
    status: Status | None = None
    run: Run | None = None
    error: str = ""


# -- the headline


def headlines(seen: Sequence[Seen], now: float) -> str:
    """A line for one run; for several how many of them are in which state."""
    if len(seen) == 1:
        return _state(seen[0], now)
    states: dict[str, int] = {}
    for one in seen:
        state = _one_word(one)
        states[state] = states.get(state, 0) + 1
    return f"<p>{text(', '.join(f'{number} {state}' for state, number in states.items()))}</p>" if seen else ""


def _one_word(one: Seen) -> str:
    if one.error:
        return "can't be read"
    if one.status is not None:
        return one.status.state
    return "finished" if one.run is not None and one.run.state_in_words == "finished" else "ended before its end"


_SIGNS = {"running": "\N{BLACK CIRCLE}", "starting": "\N{WHITE CIRCLE}", "finished": "\N{CHECK MARK}"}


def _state(one: Seen, now: float) -> str:
    if one.error or one.status is None:
        return f'<p class="state bad">{text(one.error)}</p>' if one.error else ""
    status = one.status
    bad = status.state in ("failed", "killed")
    sign = _SIGNS.get(status.state, "\N{MULTIPLICATION SIGN}" if bad else "\N{BLACK SQUARE}")
    kind = "bad" if bad else "good" if status.state in ("running", "finished") else "quiet"
    return f'<p class="state {kind}"><span aria-hidden="true">{sign}</span> {text(headline(status, now))}</p>'


# -- one run


def run(one: Seen, now: float) -> str:
    """Figures, stages, and all that `status` says."""
    if one.status is None or one.status.state == "nothing":
        return ""
    body = _figures(one.status) + _stages(one) + f"<pre>{text(status_text(one.status, now))}</pre>"
    return section("Run", body)


def _figures(status: Status) -> str:
    """What one wants to read from across the room."""
    p = status.progress
    if p is None or status.state == "finished":
        return ""
    found = [("stage", f"{p.stage} ({p.number} of {p.stages})"), ("iteration", f"{p.iter} of {p.max_iter}")]
    values = (
        ("epoch", p.epoch, lambda v: f"{v:.2f}"),
        ("learning rate", p.lr, lambda v: f"{v:.4g}"),
        ("loss", p.loss, lambda v: f"{v:.4f}"),
        ("images/s", p.images_per_second, lambda v: f"{v:.0f}"),
        ("left in stage", p.seconds_left_in_stage, duration),
        ("left in all", p.seconds_left, duration),
    )
    found += [(name, words(value)) for name, value, words in values if value is not None]
    return f'<dl class="figures">{"".join(f"<div><dt>{n}</dt><dd>{text(v)}</dd></div>" for n, v in found)}</dl>'


def _stages(one: Seen) -> str:
    """How far each stage is."""
    assert one.status is not None
    items = []
    for name, mark in one.status.stages.items():
        share = 1.0 if mark in (DONE, STALE) else float(mark.split()[0]) / 100 if mark[:1].isdigit() else 0.0
        words = {DONE: "done", STALE: "stale", "-": "to do"}.get(mark, mark)
        items.append(f"<li>{progress(share, name)}{stage_link(name)} <small>{text(words)}</small></li>")
    return f'<ul class="strip">{"".join(items)}</ul>' if items else ""


# -- what has happened


def events(seen: Sequence[Seen]) -> str:
    """Starts, ends and warnings of all runs, the newest first."""
    found = [(at, one.label, kind, words) for one in seen for at, kind, words in _events(one)]
    found.sort(key=lambda event: -event[0])
    several = len(seen) > 1
    rows = []
    for at, label, kind, words in found[:MOST_EVENTS]:
        sign = "!" if kind == "warning" else ""
        cells = [cell(_moment(at), sorts=at), *[cell(label)] * several, cell(f"{sign} {kind}".strip()), cell(words)]
        rows.append(cells)
    if not rows:
        return ""
    more = f"and {len(found) - MOST_EVENTS} older ones" if len(found) > MOST_EVENTS else ""
    head = ["when", *["run"] * several, "what", "details"]
    return section("Events", table("happened", "What has happened, newest first", head, rows) + paragraphs([more]))


def _events(one: Seen) -> list[tuple[float, str, str]]:
    found = [(w.time, "warning", w.text) for w in (one.status.warnings if one.status else ())]
    lives = one.run.history.lives if one.run else ()
    for life in lives:
        again = "started" if life.number == 1 else "started again"
        where = f" at {life.start}" if life.start else ""
        found.append(
            (life.began, again, f"{count(life.workers, 'worker')} on {life.device}{where}" if life.workers else "")
        )
        last = life is lives[-1]
        end = life.end or (
            "" if last and one.run and one.run.alive else (one.run.word if last and one.run else "") or "broken off"
        )
        if end:
            found.append(
                (life.ended, "ended", end + (f"; {life.again} iterations were done again" if life.again else ""))
            )
    return found


def _moment(at: float) -> str:
    """Local time."""
    try:
        return time.strftime("%d %b %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # a clock may say anything
        return f"{at:.0f}"


# -- what came out


def ranking(seen: Sequence[Seen], stages: Sequence[str]) -> str:
    """Stages and ensembles by what they reach: the branches of a sweep among them."""
    runs = _runs(seen)
    found = ranking_table(runs)
    return section("Ranking", report_table("ranked", found, stages)) if found.rows else ""


def results(seen: Sequence[Seen], stages: Sequence[str]) -> str:
    """The tables of `report`."""
    runs = _runs(seen)
    if not any(stage.finished for run in runs for stage in run.history.stages):
        return ""
    summary, more = all_tables(runs)
    if len(runs) > 1:
        more = [*more, differences_table(runs)]
    parts = [paragraphs(lead(runs), "lead")]
    for n, found in enumerate((*summary, *more)):
        folded = n >= len(summary) and len(found.rows) > 24
        body = report_table(f"report{n}", found, stages)
        if folded:
            body = f'<details id="fold{n}"><summary>{text(count(len(found.rows), "row"))}</summary>{body}</details>'
        parts.append(f"<h3>{text(found.title)}</h3>{body}")
    if said := notes(runs):
        parts.append(
            f'<details id="notes"><summary>{text(count(len(said), "note"))}</summary>{paragraphs(said)}</details>'
        )
    return section("Report", "".join(parts))


def _runs(seen: Sequence[Seen]) -> list[Run]:
    return [one.run for one in seen if one.run is not None]
