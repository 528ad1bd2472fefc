"""A report as one HTML file that loads nothing from elsewhere. Without its script only the values under the pointer are missing."""

from collections.abc import Callable, Sequence
from html import escape

import stagerun
from stagerun.drawing.html import STYLE as PICTURE_STYLE
from stagerun.drawing.html import colour_style, scripts, variable, whole_page
from stagerun.tools.report import kept, stale
from stagerun.tools.report.curves import COLUMNS, NARROW, WIDE, caption, colour, draw, points
from stagerun.tools.report.history import Run
from stagerun.tools.report.table import Table, moment, shown

# Rows from which a table of details is folded away, runs from which their stages are, and characters from which a cell has several
# lines.
FOLD, MANY_RUNS, LONG = 24, 6, 48

# After that of a plan's picture.
STYLE = """
:root { --paper: #f4f5f7; }
body { font-size: 15px; line-height: 1.5; }
main { max-width: 1240px; padding: 24px 20px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: 16px 20px; margin-top: 16px; }
p, li, summary, #values { overflow-wrap: anywhere; }
.lead p { margin: 4px 0; font-size: 16px; }
.legend, .stages { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 8px; padding: 0; list-style: none; }
.legend span { display: inline-block; width: 26px; vertical-align: middle; margin-right: 8px; }
.state { margin: 0 0 6px; }
.stages { gap: 8px; margin-bottom: 14px; }
.stages li { flex: 1 1 120px; max-width: 240px; font-size: 13px; line-height: 1.35; }
.stages i { display: block; height: 5px; border-radius: 3px; background: var(--grid); margin-bottom: 4px; overflow: hidden; }
.stages i i { background: var(--done); }
.stages span { display: block; color: var(--soft); }
.picture { position: relative; touch-action: pan-x pan-y; }
.narrow { display: none; }
#values td { border: 0; white-space: normal; }
.scroll { overflow: auto; max-height: 75vh; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--grid); }
th { white-space: normal; vertical-align: bottom; color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule); position: sticky; top: 0; background: var(--card); }
td.long { white-space: normal; min-width: 260px; }
.number { text-align: right; }
.best td { font-weight: 600; }
tbody tr:hover { background: var(--grid); }
tr.first td { border-top: 2px solid var(--rule); }
.note { color: var(--soft); font-size: 13px; margin: 10px 0 0; max-width: 125ch; }
summary { cursor: pointer; font-size: 17px; font-weight: 600; }
@media (max-width: 640px) {
  main { padding: 12px 8px 32px; }
  h1 { font-size: 20px; }
  section { padding: 12px 10px; }
  .wide { display: none; }
  .narrow { display: block; }
  .stages li { flex-basis: 40%; }
}
@media print { body { background: #fff; } section { border: 0; padding: 0; break-inside: avoid; } .scroll { max-height: none; } }
"""

SCRIPT = """
document.querySelectorAll(".wide, .narrow").forEach(function (frame, number) {
  const tip = tooltip(frame);
  const place = (axis, value) => axis[0] + (value - axis[2]) / (axis[3] - axis[2]) * (axis[1] - axis[0]);

  function move(event) {
    const at = tip.at(event);
    let best = null;
    for (const [kind, x, y] of data.panels[number]) {
      if (at.x < x[0] - 8 || at.x > x[1] + 8 || at.y < y[0] || at.y > y[1]) continue;
      const column = 3 + data.columns.indexOf(kind);
      for (const point of data.points) {
        if (point[column] === null) continue;
        const px = place(x, point[2]), py = place(y, point[column]);
        const far = Math.abs(px - at.x) * 3 + Math.abs(py - at.y);
        if (py <= y[1] + 1 && (best === null || far < best.far)) best = {point, px, py, far};
      }
    }
    if (best === null) { tip.hide(); return; }
    const [which, iter, epoch, top1, loss, rate, what] = best.point, series = data.series[which];
    tip.show(best.px, best.py, series.colour, series.name, [
      ["iteration", iter], ["epoch", epoch], ["top-1", top1 === null ? null : top1 + " %"],
      [rate === null ? "validation loss" : "training loss", loss], ["learning rate", rate],
    ], what);
  }

  frame.addEventListener("pointermove", move);
  frame.addEventListener("pointerdown", move);
  frame.addEventListener("pointerleave", tip.hide);
});
"""


def page(
    title: str,
    lead: Sequence[str],
    runs: Sequence[Run],
    ranking: Table | None,
    summary: Sequence[Table],
    details: Sequence[Table],
    notes: Sequence[str],
) -> str:
    """The whole document: `ranking`, how far each run is, the curves, `summary`, `details`. UsageError without matplotlib."""
    parts = [
        f"<h1>{escape(title)}</h1>",
        '<div class="lead">' + "".join(f"<p>{escape(line)}</p>" for line in lead) + "</div>",
        *([_table(ranking)] if ranking and ranking.rows else []),
        _states(runs),
        _curves(runs, title),
        *_by_run("Compressed gradients", kept.CAPTION, runs, _kept),
        *_by_run("Staleness", stale.CAPTION, runs, _stale),
        *(_table(table) for table in summary),
        *(_table(table, fold=True) for table in details),
    ]
    if notes:
        parts.append(f"<section><h2>Notes</h2><ul>{''.join(f'<li>{escape(n)}</li>' for n in notes)}</ul></section>")
    parts.append(f"<footer>stagerun {escape(stagerun.__version__)}</footer>")
    done = f":root {{ --done: var({variable(colour(2)[0])}); }}"
    return whole_page(title, PICTURE_STYLE + STYLE + colour_style() + done, "\n".join(parts))


def _states(runs: Sequence[Run]) -> str:
    """Whether each run is alive, and how far each of its stages has come."""
    items = []
    for run in runs:
        name = f"<b>{escape(run.label)}</b>: " if len(runs) > 1 else ""
        logged = f"; last logged {moment(run.history.lives[-1].ended)} UTC" if run.history.lives else ""
        items.append(f'<p class="state">{name}{escape(run.state_in_words + logged)}</p>\n<ul class="stages">')
        for stage in run.history.stages:
            share = 100.0 if stage.finished else min(100.0, 100 * stage.iter / (stage.max_iter or 1))
            state = f"<b>{escape(stage.name)}</b><span>{escape(run.state(stage))}</span>"
            items.append(f'<li><i><i style="width: {share:.1f}%"></i></i>{state}</li>')
        items.append("</ul>")
    return _section("Progress", "\n".join(items), f"{len(runs)} runs" if len(runs) >= MANY_RUNS else "")


def _curves(runs: Sequence[Run], title: str) -> str:
    drawn = [draw(runs, width, title) for width in (WIDE, NARROW)]
    found = [drawing for drawing in drawn if drawing is not None]
    if not found:
        return _section("Curves", '<p class="note">No iteration was done yet.</p>')
    series, places = points(runs)
    data = {"columns": COLUMNS, "series": series, "points": places, "panels": [drawing.panels for drawing in found]}
    pictures = "".join(
        f'<div class="{name}">{drawing.svg}</div>\n' for name, drawing in zip(("wide", "narrow"), found, strict=True)
    )
    legend = []
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        legend.append(
            f'<li><span style="border-top: 3px {dashes} var({variable(hue)})"></span>{escape(run.label)}</li>'
        )
    body = "\n".join(
        [
            f'<ul class="legend">{"".join(legend)}</ul>'
            if len(runs) > 1
            else "",  # else stages are named beneath the curves
            f'<div class="picture">{pictures}<div id="values" role="status"></div></div>',
            f'<p class="note">{escape(caption(runs))}</p>',
        ]
    )
    return f"{_section('Curves', body)}\n{scripts(data, SCRIPT)}"


def _by_run(title: str, caption: str, runs: Sequence[Run], picture: Callable[[Run], str]) -> list[str]:
    """A section for each run that has such a picture."""
    found = [(run.label, drawn) for run in runs if (drawn := picture(run))]
    return [
        _section(
            title if len(runs) == 1 else f"{title}: {escape(label)}",
            f'{drawn}\n<p class="note">{escape(caption)}.</p>',
            f"{len(found)} runs" if len(runs) >= MANY_RUNS else "",
        )
        for label, drawn in found
    ]


def _kept(run: Run) -> str:
    """The section on compressed gradients."""
    matrix = kept.matrix(run)
    return "" if matrix is None else kept.draw(matrix, run.label)


def _stale(run: Run) -> str:
    """The section on stages whose replicas push."""
    rows = stale.rows(run)
    return stale.draw(rows, run.label) if rows else ""


def _section(title: str, body: str, folded: str = "") -> str:
    """`folded`: how much there is to unfold; '' where all of it is shown."""
    if not folded:
        return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"
    return f"<section>\n<details><summary>{title} ({folded})</summary>\n{body}\n</details>\n</section>"


def _table(table: Table, fold: bool = False) -> str:
    body = rows(table) if table.rows else ""
    body += "".join(f'<p class="note">{escape(note)}.</p>' for note in table.notes)
    many = fold and len(table.rows) >= FOLD
    return _section(escape(table.title), body, f"{len(table.rows)} rows" if many else "")


def rows(table: Table) -> str:
    columns, cells_of = shown(table)
    classes = ["" if c.kind == "text" else ' class="number"' for c in columns]
    head = "".join(f'<th scope="col"{k}>{escape(c.title)}</th>' for c, k in zip(columns, classes, strict=True))
    lines = []
    by_run = bool(columns) and columns[0].key == "run"
    for i, row in enumerate(cells_of):
        kinds = [' class="long"' if len(cell) > LONG else k for cell, k in zip(row, classes, strict=True)]
        cells = "".join(f"<td{k}>{escape(cell)}</td>" for cell, k in zip(row, kinds, strict=True))
        begins = by_run and len(cells_of) > len({r[0] for r in cells_of}) and i > 0 and row[0] != cells_of[i - 1][0]
        best = ' class="best"' if columns[0].key == "rank" and i == 0 else ""
        lines.append(('<tr class="first">' if begins else f"<tr{best}>") + f"{cells}</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )
