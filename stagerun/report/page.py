"""A report as one HTML file that loads nothing from anywhere."""

from collections.abc import Sequence
from html import escape

import stagerun
from stagerun.report.curves import colour, curves
from stagerun.report.runs import Run
from stagerun.report.tables import Table
from stagerun.report.written import shown

# Rows from which a table of details is folded away.
FOLD = 24

STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f4f5f7; color: #1d2430;
       font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 10px; }
section { background: #fff; border: 1px solid #e1e4e8; border-radius: 8px; padding: 18px 20px; margin-top: 18px; }
.lead p { margin: 4px 0; font-size: 16px; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 22px; margin: 0 0 8px; padding: 0; list-style: none; }
.legend li { overflow-wrap: anywhere; }
.legend span { display: inline-block; width: 26px; border-top-width: 3px; vertical-align: middle; margin-right: 8px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 8px; text-align: left; white-space: nowrap; border-bottom: 1px solid #eceef1; }
th { color: #5b6472; font-weight: 600; border-bottom: 2px solid #d5d9df; }
.number { text-align: right; }
tbody tr:hover { background: #f6f8fb; }
tr.first td { border-top: 2px solid #d5d9df; }
.note { color: #5b6472; font-size: 13px; margin: 10px 0 0; max-width: 125ch; }
summary { cursor: pointer; font-size: 17px; font-weight: 600; }
footer { color: #7a8391; font-size: 12.5px; margin-top: 20px; }
@media print { body { background: #fff; } section { border: 0; padding: 0; break-inside: avoid; } }
"""


def page(
    title: str,
    lead: Sequence[str],
    runs: Sequence[Run],
    summary: Sequence[Table],
    details: Sequence[Table],
    notes: Sequence[str],
) -> str:
    """The whole document: `summary`, the curves, `details`. UsageError without matplotlib."""
    svg, caption = curves(runs)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head>",
        f"<body><main>\n<h1>{escape(title)}</h1>",
        '<div class="lead">' + "".join(f"<p>{escape(line)}</p>" for line in lead) + "</div>",
        *(_section(table, fold=False) for table in summary),
        f'<section>\n<h2>Curves</h2>\n{_legend(runs)}\n{svg}<p class="note">{escape(caption)}</p>\n</section>',
        *(_section(table, fold=True) for table in details),
    ]
    if notes:
        parts.append(
            "<section><h2>Notes</h2><ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul></section>"
        )
    parts += [f"<footer>stagerun {escape(stagerun.__version__)}</footer>", "</main></body></html>", ""]
    return "\n".join(parts)


def _legend(runs: Sequence[Run]) -> str:
    items = []
    for number, run in enumerate(runs):
        hue, dashes = colour(number)
        items.append(f'<li><span style="border-top: 3px {dashes} {hue}"></span>{escape(run.label)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def _section(table: Table, fold: bool) -> str:
    title, body = escape(table.title), _table(table) if table.rows else ""
    body += "".join(f'<p class="note">{escape(note)}.</p>' for note in table.notes)
    if not fold or len(table.rows) < FOLD:
        return f"<section>\n<h2>{title}</h2>\n{body}\n</section>"
    summary = f"<summary>{title} ({len(table.rows)} rows)</summary>"
    return f"<section>\n<details>{summary}\n{body}\n</details>\n</section>"


def _table(table: Table) -> str:
    columns, rows = shown(table)
    classes = ["" if c.kind == "text" else ' class="number"' for c in columns]
    head = "".join(f"<th{k}>{escape(c.title)}</th>" for c, k in zip(columns, classes, strict=True))
    lines = []
    by_run = bool(columns) and columns[0].key == "run"
    for i, row in enumerate(rows):
        cells = "".join(f"<td{k}>{escape(cell)}</td>" for cell, k in zip(row, classes, strict=True))
        begins = by_run and len(rows) > len({r[0] for r in rows}) and i > 0 and row[0] != rows[i - 1][0]
        lines.append(('<tr class="first">' if begins else "<tr>") + cells + "</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )
