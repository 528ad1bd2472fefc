"""Pictures and tables as a part of someone else's page: the output of a notebook's cell."""

from collections.abc import Sequence
from html import escape

from stagerun.drawing.html import dark_colours, light_colours

# A notebook says which theme it has; elsewhere the reader's system does.
STYLE = f"""
.stagerun {{ --card: #ffffff; {light_colours()} }}
@media (prefers-color-scheme: dark) {{ .stagerun {{ {dark_colours()} }} }}
[data-jp-theme-light="true"] .stagerun, .vscode-light .stagerun {{ --card: #ffffff; {light_colours()} }}
[data-jp-theme-light="false"] .stagerun, .vscode-dark .stagerun {{ {dark_colours()} }}
.stagerun {{ background: var(--card); color: var(--ink); padding: 8px 12px; border-radius: 6px; max-width: 1100px;
  font: 13px/1.45 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }}
.stagerun svg {{ display: block; width: 100%; height: auto; }}
.stagerun .scroll {{ overflow: auto; max-height: 75vh; }}
.stagerun table {{ border-collapse: collapse; margin: 8px 0 0; font-variant-numeric: tabular-nums; color: var(--ink); }}
.stagerun tr {{ background: var(--card); }}
.stagerun th, .stagerun td {{ padding: 3px 8px; text-align: left; border: 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }}
.stagerun th {{ color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule); }}
.stagerun td.long {{ white-space: normal; min-width: 260px; }}
.stagerun .number {{ text-align: right; }}
.stagerun p {{ margin: 6px 0 0; color: var(--soft); }}
.stagerun pre {{ white-space: pre-wrap; color: var(--ink); background: none; font-size: 12px; }}
.stagerun summary {{ cursor: pointer; color: var(--soft); margin-top: 6px; }}
"""


def cell(*parts: str) -> str:
    """The HTML of an output. It loads nothing, runs nothing, and its style reaches nothing around it."""
    return f'<div class="stagerun">\n<style>{STYLE}</style>\n' + "\n".join(part for part in parts if part) + "\n</div>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """The first row is the head. Columns whose cells all begin with a digit are aligned right."""
    right = [all(not row[i] or row[i][0].isdigit() for row in rows[1:]) for i in range(len(rows[0]))]

    def line(row: Sequence[str], tag: str) -> str:
        opening = [f'<{tag} class="number">' if r else f"<{tag}>" for r in right]
        cells = (f"{begin}{escape(text)}</{tag}>" for begin, text in zip(opening, row, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "\n".join(line(row, "td") for row in rows[1:])
    return f'<div class="scroll"><table>\n<thead>{line(rows[0], "th")}</thead>\n<tbody>\n{body}\n</tbody></table></div>'


def note(text: str) -> str:
    return f"<p>{escape(text, quote=False)}</p>"


def folded(title: str, text: str) -> str:
    """Text as it stands, to be unfolded."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
