"""A table of a report: as a value, as Markdown that is readable in a terminal, as CSV and tab-separated values. Pure."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from stagerun.base.text import duration, parts, size, wrapped

Value = str | int | float | None
Cells = Sequence[tuple["Column", Callable[..., Value]]]  # columns, each with what it says of an item


@dataclass(frozen=True, slots=True)
class Column:
    """`key` heads it in CSV, `title` where people read it ('': only in CSV). `kind` is `text` or a key of
    WORDS. A column that says `dull` or nothing in every row is not shown to people, and an `optional` one is not in the table. `note`: a
    sentence on its numbers, for a table that has it.
    """

    key: str
    title: str
    kind: str
    dull: Value = None
    optional: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`notes` are sentences on how its numbers came about."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


RUN = Column("run", "run", "text")


def table_of(title: str, cells: Cells, items: Iterable[tuple[object, ...]], *notes: str) -> Table:
    """A row for each item, which the functions of `cells` take as their arguments."""
    rows = [tuple(value(*item) for _, value in cells) for item in items]
    columns = [column for column, _ in cells]
    kept = [i for i, c in enumerate(columns) if not c.optional or {row[i] for row in rows} - {None, "", c.dull}]
    said = dict.fromkeys((*notes, *(columns[i].note for i in kept if columns[i].note)))
    return Table(title, tuple(columns[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows), (*said,))


def moment(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # a clock may say anything
        return f"{time:.0f}"


# How a value of a kind is written for people. Fractions (0..1) become percents or percentage points.
WORDS: dict[str, Callable[[float], str]] = {
    "count": lambda v: f"{v:.0f}",
    "epochs": lambda v: f"{v:.2f}",
    "rate": lambda v: f"{v:.4g}",
    "loss": lambda v: f"{v:.4f}",
    "percent": lambda v: f"{100 * v:.2f} %",
    "points": lambda v: f"{100 * v:+.2f}",
    "spread": lambda v: f"{100 * v:.2f}",
    "share": lambda v: f"{100 * v:.1f} %",
    "factor": lambda v: f"{v:.2f}",
    "speed": lambda v: f"{v:.0f}" if v >= 10 else f"{v:.2f}",
    "time": lambda seconds: duration(seconds, ".1f"),  # an epoch may take less than a second
    "moment": moment,
    "bytes": size,
}


def words(value: Value, kind: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return WORDS[kind](value)


def shown(table: Table) -> tuple[list[Column], list[list[str]]]:
    """The columns for people, and the rows in words. Dull columns, and a run or schedule that is the same in every row, are left out."""
    kept = []
    for i, column in enumerate(table.columns):
        values = {row[i] for row in table.rows}
        same = column.key in ("run", "schedule") and len(values) == 1
        if column.title and values - {None, "", column.dull} and not same:
            kept.append(i)
    cells = [[words(row[i], table.columns[i].kind) for i in kept] for row in table.rows]
    return [table.columns[i] for i in kept], cells


def _escaped(text: str, room: int | None) -> str:
    """For Markdown in a file; on a terminal of `room` columns as it is."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|") if room is None else text


def markdown(table: Table, room: int | None = None) -> str:
    """Title, table and notes. Columns are padded, numbers aligned right. A table wider than `room` becomes several."""
    columns, cells = shown(table)
    lines = [f"## {table.title}", ""]
    if table.rows:
        rows = [[c.title for c in columns], *cells]
        rows = [[_escaped(cell, room) for cell in row] for row in rows]
        widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(columns))]
        right = [c.kind != "text" for c in columns]
        padded = [
            [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
            for row in rows
        ]
        padded.insert(1, ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)])
        for part in parts([w + 1 for w in widths], room and room - 3):
            lines += [f"| {' | '.join(row[i] for i in part)} |" for row in padded] + [""]
    lines += [f"{_escaped(note, room)}." for note in table.notes]
    return "\n".join(lines).rstrip() + "\n"


def separated(table: Table, delimiter: str) -> str:
    """One header line with keys, then the values at full precision: fractions as fractions, times in seconds."""
    rows = (["" if v is None else repr(v) if isinstance(v, float) else v for v in row] for row in table.rows)
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows([[c.key for c in table.columns], *rows])
    return text.getvalue()


def document(
    title: str, lead: Sequence[str], tables: Sequence[Table], notes: Sequence[str], room: int | None = None
) -> str:
    """A Markdown document, with tables for a terminal of `room` columns; None: for a file."""
    blocks = [f"# {_escaped(title, room)}\n"]
    blocks += [_escaped(line, room) + "\n" for line in lead]
    blocks += [markdown(table, room) for table in tables]
    if notes:
        blocks.append("## Notes\n\n" + "".join(f"- {_escaped(note, room)}\n" for note in notes))
    return wrapped("\n".join(blocks), room)
