"""Pieces of HTML that all sections of the page share. Pure. What comes from files goes through `text` alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from urllib.parse import quote

from stagerun.base.errors import Problem
from stagerun.base.text import shown as printable
from stagerun.tools.report.table import Table, shown

MOST_ROWS = 500  # of a table in the page
LONG = 44  # characters from which a cell has several lines


def text(words: object) -> str:
    """Words as they stand in HTML, in a text or an attribute in double quotes."""
    return escape(printable(str(words)))


def section(title: str, body: str, *, note: str = "") -> str:
    """A heading and what is under it; '' where that is nothing."""
    said = f" <small>{text(note)}</small>" if note else ""
    return f"<h2>{text(title)}{said}</h2>\n{body}" if body else ""


def paragraphs(lines: Iterable[str], kind: str = "note") -> str:
    return "".join(f'<p class="{kind}">{text(line)}</p>' for line in lines if line)


def stage_link(name: str, words: str = "") -> str:
    """Chooses a stage."""
    return f'<a href="#stage={text(quote(name, safe=""))}" data-stage="{text(name)}">{text(words or name)}</a>'


@dataclass(frozen=True, slots=True)
class Cell:
    """`html` is what is shown; `sorts`: by what a column is sorted, if that isn't the text."""

    html: str
    number: bool = False
    sorts: float | None = None
    long: bool = False


def cell(words: object, *, number: bool = False, sorts: float | None = None) -> Cell:
    return Cell(text(words), number, sorts, len(str(words)) > LONG)


def table(
    id: str,
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    sorted_by: bool = False,
    foot: int = 0,
) -> str:
    """The first cell of a row heads it. `sorted_by`: a button in each heading sorts. `foot`: of the last rows so many stay below. `caption`
    is for those who don't see it."""
    numbers = [any(row[i].number for row in rows) for i in range(len(head))]
    heads = []
    for number, title in zip(numbers, head, strict=True):
        kind = ' class="number"' if number else ""
        said = f'<button type="button">{text(title)}</button>' if sorted_by and title else text(title)
        heads.append(f'<th scope="col"{kind}>{said}</th>')
    body, last = rows[: len(rows) - foot], rows[len(rows) - foot :]
    more = f'<p class="note">and {len(body) - MOST_ROWS} more rows</p>' if len(body) > MOST_ROWS else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table id="{text(id)}">'
        f'<caption class="unseen">{text(caption)}</caption>\n<thead><tr>{"".join(heads)}</tr></thead>\n'
        f"<tbody>{''.join(map(_row, body[:MOST_ROWS]))}</tbody>"
        + (f"<tfoot>{''.join(map(_row, last))}</tfoot>" if last else "")
        + f"</table></div>{more}"
    )


def _row(cells: Sequence[Cell]) -> str:
    words = []
    for n, one in enumerate(cells):
        number = ' class="number"' if one.number else ' class="long"' if one.long else ""
        value = f' data-value="{one.sorts!r}"' if one.sorts is not None else ""
        tag = 'th scope="row"' if n == 0 else "td"
        words.append(f"<{tag}{number}{value}>{one.html}</{tag.partition(' ')[0]}>")
    return f"<tr>{''.join(words)}</tr>\n"


def report_table(id: str, found: Table, stages: Sequence[str] = ()) -> str:
    """A table of `report`, which sorts; names of `stages` choose them."""
    kept, words = shown(found)
    places = [found.columns.index(column) for column in kept]
    rows = []
    for said, values in zip(words, found.rows, strict=True):
        cells = []
        for n, (column, one) in enumerate(zip(kept, said, strict=True)):
            value = values[places[n]]
            sorts = float(value) if isinstance(value, int | float) else None
            if column.key in ("stage", "what") and one in stages:
                cells.append(Cell(stage_link(one)))
            else:
                cells.append(cell(one, number=column.kind != "text", sorts=sorts))
        rows.append(cells)
    if not rows:
        return paragraphs(f"{note}." for note in found.notes)
    made = table(id, found.title, [column.title for column in kept], rows, sorted_by=len(rows) > 1)
    return made + paragraphs(f"{note}." for note in found.notes)


def problem(found: Problem, stage: str = "", kind: str = "mistake") -> str:
    """A mistake or a finding, as `check` shows it, with a link to the stage that it is in."""
    link = f"<p>{stage_link(stage, f'stage {stage}')}</p>" if stage else ""
    return f'<article class="{kind}"><pre>{text(found.render())}</pre>{link}</article>'


def progress(share: float, label: str) -> str:
    return f'<progress value="{min(1.0, max(0.0, share)):.4f}" max="1" aria-label="{text(label)}"></progress>'
