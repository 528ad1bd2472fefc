"""A picture as one page that loads nothing: the SVG, and what the pointer is on.

Without its script the page is the picture. The script reads numbers from a block of JSON, and writes text, never markup.
"""

import json
import re
from html import escape

import stagerun
from stagerun.drawing.bands import leaves, size_text
from stagerun.drawing.colours import DARK, GRID, INK, RULE, SOFT, strokes
from stagerun.drawing.figure import Drawn, draw, drawing, saved_svg
from stagerun.drawing.picture import Picture, StagePicture, Unit
from stagerun.drawing.scale import Scale

# Nothing may be fetched, whatever a later change puts in.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_REFRESHING = '<meta http-equiv="refresh" content="2">'  # seconds after which a page that is watched reads itself again

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #ffffff; }
body { margin: 0; background: var(--paper); color: var(--ink);
       font: 14px/1.45 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 12px 16px 32px; }
#picture { position: relative; }
svg { display: block; width: 100%; height: auto; }
#values { position: absolute; top: 0; left: 0; display: none; pointer-events: none; background: var(--card);
          border: 1px solid var(--rule); border-radius: 6px; padding: 6px 10px; font-size: 13px; max-width: 340px;
          box-shadow: 0 2px 8px rgba(0, 0, 0, 0.25); font-variant-numeric: tabular-nums; }
#values b { display: block; }
#values table { border-collapse: collapse; }
#values td { padding: 0 10px 0 0; vertical-align: top; }
#values td:first-child { color: var(--soft); white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 14px; }
footer { color: var(--soft); font-size: 12px; margin-top: 12px; }
"""

# What a script needs to show what the pointer is on: the data of the page, and of each frame with a picture a dot and a box beside it.
TOOLTIP = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const values = document.getElementById("values");

function marker(svg, kind) {
  const mark = svg.appendChild(document.createElementNS(svg.namespaceURI, kind));
  mark.style.display = "none";
  mark.style.pointerEvents = "none";
  return mark;
}

function tooltip(frame) {
  const svg = frame.querySelector("svg"), dot = marker(svg, "circle");
  dot.setAttribute("r", 3.5);
  function at(event) {
    return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  }
  function hide() { dot.style.display = values.style.display = "none"; }

  // `rows` are names and values; what is null has no row.
  function show(x, y, colour, title, rows, remark) {
    values.replaceChildren();
    values.appendChild(document.createElement("b")).textContent = title;
    const table = values.appendChild(document.createElement("table"));
    for (const [name, value] of rows) {
      if (value === null) continue;
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = String(value);
    }
    if (remark) values.appendChild(document.createElement("span")).textContent = remark;
    dot.setAttribute("cx", x);
    dot.setAttribute("cy", y);
    dot.style.fill = colour;
    dot.style.display = "";
    values.style.display = "block";
    const scale = svg.clientWidth / svg.viewBox.baseVal.width, left = x * scale, wide = values.offsetWidth;
    values.style.left = Math.max(0, left + 14 + wide > frame.clientWidth ? left - 14 - wide : left + 14) + "px";
    values.style.top = Math.max(0, Math.min(y * scale + 10, frame.clientHeight - values.offsetHeight)) + "px";
  }
  return {svg, at, show, hide};
}
"""

SCRIPT = """
(function () {
  const frame = document.getElementById("picture"), tip = tooltip(frame), cursor = marker(tip.svg, "line");
  for (const [name, value] of [["y1", data.top], ["y2", data.bottom], ["stroke", "currentColor"], ["stroke-width", 0.6]])
    cursor.setAttribute(name, value);

  // The point of a stage that is nearest along x.
  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][1] <= x) low = middle; else high = middle;
    }
    return Math.abs(points[low][1] - x) <= Math.abs(points[high][1] - x) ? points[low] : points[high];
  }

  // Of the stages there: the one of the band's line, or else the one whose curve is nearest.
  function find(x, y) {
    const row = data.rows.find(r => y >= r[1] && y < r[2]);
    let best = null;
    for (const stage of data.stages) {
      if (x < stage.from - 3 || x > stage.to + 3) continue;
      const point = nearest(stage.points, x);
      let far = Math.abs(Math.min(Math.max(x, stage.from), stage.to) - x);
      if (!row) far += Math.abs(point[2] - y); else if (row[0] !== null && row[0] !== stage.lane) far += 1e6;
      if (best === null || far < best.far) best = {stage, point, far};
    }
    return best;
  }

  function show({stage, point: [iter, x, y, lr, momentum, decay, size]}) {
    const images = stage.images + iter * stage.batch;
    for (const name of ["x1", "x2"]) cursor.setAttribute(name, x);
    cursor.style.display = "";
    tip.show(x, y, stage.colour, stage.name + stage.remark, [
      ["iteration", `${iter} of ${stage.iterations}`], ["epoch", (images / stage.epoch).toFixed(4)],
      ["learning rate", lr], ["momentum", momentum], ["weight decay", decay], ["batch", stage.batch],
      ["image size", size], ["augmentation", stage.augmentation],
    ]);
  }

  function hide() {
    cursor.style.display = "none";
    tip.hide();
  }

  frame.addEventListener("pointermove", function (event) {
    const at = tip.at(event), found = at.y >= data.top && at.y <= data.bottom ? find(at.x, at.y) : null;
    if (found) show(found); else hide();
  });
  frame.addEventListener("pointerleave", hide);
})();
"""


def html(picture: Picture, unit: Unit, scale: Scale, watched: bool = False) -> str:
    """The whole document. `watched`: it reads itself again every few seconds. UsageError without matplotlib."""
    with drawing():
        drawn = draw(picture, unit, scale, paper="none")
        data = _data(picture, unit, scale, drawn)
        label = f"Learning rate of {picture.name} over its stages, and their settings"
        body = inline(saved_svg(drawn.figure, picture.name), label)
    parts = [
        f'<div id="picture">{body}<div id="values" role="status"></div></div>',
        f"<footer>stagerun {escape(stagerun.__version__)}</footer>",
        scripts(data, SCRIPT),
    ]
    return _page(f"{picture.name}: learning rate", "\n".join(parts), watched)


def problem_html(text: str, watched: bool = False) -> str:
    """What is wrong, in place of the picture."""
    return _page("mistakes", f"<pre>{escape(text)}</pre>", watched)


def still(page: str) -> str:
    """A page that was watched, as one that is not."""
    return page.replace(f"{_REFRESHING}\n", "", 1)


def _page(title: str, body: str, watched: bool) -> str:
    return whole_page(title, STYLE + colour_style(), body, _REFRESHING + "\n" if watched else "")


def whole_page(title: str, style: str, body: str, refreshing: str = "") -> str:
    """A document that loads nothing from anywhere."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
{refreshing}<title>{escape(title)}</title>
<style>{style}</style></head>
<body><main>
{body}
</main></body></html>
"""


def variable(colour: str) -> str:
    """The style variable that stands for a colour of the light set."""
    return "--c" + colour.lstrip("#")


def colour_style() -> str:
    return f":root {{ {light_colours()}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark_colours()}}} }}\n"


def light_colours() -> str:
    """Variables of a style. Those of texts follow the others, in the dark, too."""
    light = "".join(f"{variable(colour)}: {colour}; " for colour in DARK)
    texts = "".join(
        f"--{word}: var({variable(colour)}); "
        for word, colour in (("ink", INK), ("soft", SOFT), ("rule", RULE), ("grid", GRID))
    )
    return light + texts


def dark_colours() -> str:
    own = "--paper: #14181e; --card: #1f252d; "
    return own + "".join(f"{variable(colour)}: {other}; " for colour, other in DARK.items())


def inline(svg: str, label: str) -> str:
    """As it stands in a page: without prolog, namespaces and what a file viewer needs; its colours are the page's."""
    svg = svg[svg.index("<svg ") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # A viewer would show the title beside the values.
    svg = re.sub(r"<title>.*?</title>\s*", "", svg, count=1, flags=re.DOTALL)
    opening, rest = svg[: svg.index(">")], svg[svg.index(">") :]
    opening = re.sub(r' (?:width|height|xmlns(?::\w+)?|version)="[^"]*"', "", opening)
    # Only styles have colours; a name in the files may look like one.
    rest = re.sub(r'style="[^"]*"', lambda style: _themed(style.group()), rest)
    return opening.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1) + rest


def _themed(style: str) -> str:
    style = re.sub(r"#[0-9a-f]{6}", lambda m: f"var({variable(m.group())})" if m.group() in DARK else m.group(), style)
    return style.replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")


def scripts(data: object, script: str) -> str:
    """The page's data, as JSON that ends no script and begins no comment, and `script` after TOOLTIP."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="data">{text}</script>\n<script>{TOOLTIP}{script}</script>'


def _data(picture: Picture, unit: Unit, scale: Scale, drawn: Drawn) -> dict[str, object]:
    """Places are in points of the SVG; numbers to be shown are texts, with six digits."""
    lanes, of = picture.lanes(unit), strokes(picture, unit)
    top = drawn.place(0.0, scale.at(scale.high))[1]
    return {
        "top": round(top, 2),
        "bottom": round(drawn.rows[-1].bottom, 2),
        "rows": [[row.lane, round(row.top, 2), round(row.bottom, 2)] for row in drawn.rows],
        "stages": [
            {
                "name": stage.name,
                "remark": _remark(stage),
                "lane": lanes[stage.name],
                "colour": f"var({variable(of[stage.name].colour)})",
                "from": _place(stage, 0, unit, drawn),
                "to": _place(stage, stage.iterations, unit, drawn),
                "iterations": stage.iterations,
                "images": stage.begin_own,
                "epoch": stage.images,
                "batch": stage.batch_size,
                "augmentation": stage.augmentation,
                "points": _points(stage, unit, scale, drawn),
            }
            for stage in picture.stages
        ],
    }


def _remark(stage: StagePicture) -> str:
    left = f", {leaves(stage)}" if stage.leaves_early else ""
    return left + ("" if stage.enabled else " (not enabled)")


def _place(stage: StagePicture, iter: int, unit: Unit, drawn: Drawn) -> float:
    return round(drawn.place(stage.x(iter, unit), 0.0)[0], 2)


def _points(stage: StagePicture, unit: Unit, scale: Scale, drawn: Drawn) -> list[list[object]]:
    found: list[list[object]] = []
    for p in stage.points:
        x, y = drawn.place(stage.x(p.iter, unit), scale.at(p.lr))
        texts = [f"{p.lr:.6g}", f"{p.momentum:.6g}", f"{p.weight_decay:.6g}", size_text(p)]
        found.append([p.iter, round(x, 2), round(y, 2), *texts])
    return found
