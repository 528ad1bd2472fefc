"""The page: its sections by id, and the document that holds them, served or as one file. Pure."""

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

import stagerun
from stagerun.base.text import count
from stagerun.drawing.colours import colour_style
from stagerun.drawing.picture import Unit
from stagerun.drawing.scale import make_scale
from stagerun.tools.view import before as planned
from stagerun.tools.view import during
from stagerun.tools.view.before import Before
from stagerun.tools.view.chart import chart, style
from stagerun.tools.view.looking import Looker
from stagerun.tools.view.sections import paragraphs, section, text

# Nothing may be fetched from elsewhere, nothing runs but the page's own script, and no page may hold this one.
_NOWHERE = "base-uri 'none'; form-action 'none'"
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"{_NOWHERE}; frame-ancestors 'none'"
)

# In the order in which they stand in the page.
SECTIONS = ("head", "mistakes", "run", "picture", "ranking", "events", "plan", "findings", "report")


def sections(looker: Looker, unit: Unit, now: float) -> dict[str, str]:
    """By id, what stands in each section; '' hides it."""
    before, seen = looker.before, looker.seen
    stages = before.stages if before is not None else ()
    return {
        "head": head(looker, now),
        "run": during.run(seen[0], now) if len(seen) == 1 else "",
        "events": during.events(seen),
        "mistakes": planned.wrong(looker.error, before.schedule if before is not None else None),
        "picture": picture(looker, unit),
        "ranking": during.ranking(seen, stages),
        "plan": planned.plan(before, looker.alive),
        "findings": planned.findings(before),
        "report": during.results(seen, stages),
    }


def title(looker: Looker) -> str:
    names = [looker.before.picture.name] if looker.before is not None else []
    return ", ".join(names) or ", ".join(filter(None, [looker.asked.folder, *map(str, looker.asked.outs)]))


def head(looker: Looker, now: float) -> str:
    lines = during.headlines(looker.seen, now)
    if looker.error is not None:
        wrong = count(max(1, len(getattr(looker.error, "problems", ()))), "mistake")
        lines = f'<p class="state bad"><span aria-hidden="true">\N{MULTIPLICATION SIGN}</span> {wrong}</p>' + lines
    return f"<h1>{text(title(looker))}</h1>{lines}"


def bug(error: Exception) -> str:
    """In place of mistakes, where rendering them or something else has failed."""
    said = f"this is a bug of stagerun: {type(error).__name__}: {error}; the command has printed where"
    return section("The page could not be drawn anew", paragraphs([said], "bad"))


def picture(looker: Looker, unit: Unit) -> str:
    if looker.before is None:
        nothing = "no snapshot says yet what is trained" if looker.asked.outs else ""
        return section("Schedule", paragraphs([nothing])) if nothing else ""
    drawn = looker.before.picture
    runs = [one.run for one in looker.seen if one.run is not None]
    return f'<h2 class="unseen">Learning rate</h2><div class="frame">{chart(drawn, unit, make_scale(drawn), runs)}<div id="values"></div></div>'


# -- the document


def stylesheet() -> str:
    return colour_style() + style() + _file("page.css")


def script() -> str:
    return _file("page.js")


def _file(name: str) -> str:
    return files("stagerun.tools.view").joinpath(name).read_text(encoding="utf-8")


def document(name: str, found: Mapping[str, str], version: str) -> str:
    """As it is served. `version`: of the sections; the page asks for what is newer."""
    links = '<link rel="stylesheet" href="page.css"><script src="page.js" defer></script>'
    return _document(name, links, found, f' data-version="{text(version)}"')


def saved(name: str, found: Mapping[str, str], details: Mapping[str, str]) -> str:
    """As one file that loads nothing; `details` by stage."""
    policy = "default-src 'none'; " + "; ".join(
        f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(said.encode()).digest()).decode()}'"
        for kind, said in (("style", stylesheet()), ("script", script()))
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}; img-src data:; {_NOWHERE}">'
    hidden = "".join(f'<div hidden data-detail="{text(stage)}">{html}</div>' for stage, html in details.items())
    body = f"{hidden}\n<script>{script()}</script>"  # last, since it runs where it stands
    return _document(name, f"{meta}\n<style>{stylesheet()}</style>", found, "", body)


def _document(name: str, links: str, found: Mapping[str, str], attributes: str, more: str = "") -> str:
    parts = []
    for id in SECTIONS[1:]:
        html = found.get(id, "")
        parts.append(f'<section id="{id}"{"" if html else " hidden"}>{html}</section>')
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">
{links}
<title>{text(name)}</title></head>
<body{attributes}><a class="skip" href="#picture">to the picture</a>
<header id="head" aria-live="polite">{found.get("head", "")}</header>
<p id="lost" role="alert" hidden>The server has gone. The page shows what it last said, and comes back when it does.</p>
<main>
{chr(10).join(parts)}
</main>
<aside id="detail" aria-label="The chosen stage" tabindex="-1" hidden><button type="button" id="close">Close (Esc)</button><div></div></aside>
<footer>stagerun {text(stagerun.__version__)}</footer>
{more}</body></html>
"""


def details(before: Before | None) -> dict[str, str]:
    """What a click on each stage shows, by its name."""
    return {name: planned.detail(before, name) for name in before.stages} if before is not None else {}
