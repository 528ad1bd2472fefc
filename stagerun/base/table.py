"""A table of values, printed as text, Markdown or CSV. Pure."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from stagerun.base import text

Value = str | int | float | None
Row = dict[str, Value]


# Formats for people; "text" needs none. Shares (0 to 1) are shown in percent or percentage points.
FORMATS: dict[str, Callable[[float], str]] = {
    "count": lambda v: f"{v:.0f}",
    "epochs": lambda v: f"{v:.2f}",
    "rate": lambda v: f"{v:.4g}",
    "loss": lambda v: f"{v:.4f}",
    "percent": lambda v: f"{100 * v:.2f} %",
    "points": lambda v: f"{100 * v:+.2f}",
    "spread": lambda v: f"{100 * v:.2f}",
    "speed": lambda v: f"{v:.0f}" if v >= 10 else f"{v:.2f}",
    "time": lambda seconds: text.duration(seconds, ".1f"),
    "moment": lambda time: datetime.fromtimestamp(time, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
    "bytes": text.size,
}


@dataclass(frozen=True, slots=True)
class Column:
    """`key` is its name in CSV, `title` the heading for people, `kind` "text" or a key of FORMATS. People don't see a column without a title,
    nor one in which every cell is empty or `dull`. `note` explains the numbers."""

    key: str
    title: str
    kind: str = "text"
    dull: Value = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` hold values by the key of their column; a missing one is empty."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Value]]
    notes: tuple[str, ...] = ()


def row_of(columns: Sequence[Column], *sources: object, **values: Value) -> Row:
    """Return a row of `values`, and for other columns of the attribute that a source has under the column's key."""
    for key in (column.key for column in columns if column.key not in values):
        values[key] = next((getattr(source, key) for source in sources if hasattr(source, key)), None)
    return values


def shown(table: Table) -> tuple[list[Column], list[list[str]]]:
    """Return the columns for people and the formatted rows. A single run needs no column."""
    kept = []
    for column in table.columns:
        values = {row.get(column.key) for row in table.rows}
        if column.title and values - {None, "", column.dull} and (column.key != "run" or len(values) > 1):
            kept.append(column)
    return kept, [[_formatted(row.get(column.key), column.kind) for column in kept] for row in table.rows]


def _formatted(value: Value, kind: str) -> str:
    return value or "" if value is None or isinstance(value, str) else FORMATS[kind](value)


def notes_of(table: Table) -> list[str]:
    """Return as sentences the notes of the table and of its visible columns."""
    notes = [*table.notes, *(column.note for column in shown(table)[0] if column.note)]
    return [f"{note}." for note in dict.fromkeys(notes)]


def as_text(table: Table) -> str:
    """Return the table for a terminal, numbers aligned right; a table wider than the terminal is cut into several."""
    columns, cells = shown(table)
    rows = [[column.title for column in columns], *cells]
    for i, column in enumerate(columns):
        width = max(len(row[i]) for row in rows)
        for row in rows if column.kind != "text" else ():
            row[i] = row[i].rjust(width)
    return "\n".join([table.title, *(text.columns(rows) if columns else ()), *notes_of(table)])


def as_markdown(table: Table) -> str:
    columns, cells = shown(table)
    rule = ["---" if column.kind == "text" else "---:" for column in columns]
    rows = [[escaped(column.title) for column in columns], rule, *(map(escaped, row) for row in cells)]
    lines = [f"| {' | '.join(row)} |" for row in rows] if columns else []
    return "\n".join([f"## {table.title}", "", *lines, "", *map(escaped, notes_of(table))])


def escaped(line: str) -> str:
    """Return text for Markdown that shows names as they are."""
    return line.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def as_csv(table: Table) -> str:
    """Return a header of keys and the rows at full precision: shares from 0 to 1, times in seconds."""
    file = io.StringIO()
    keys = [column.key for column in table.columns]
    csv.writer(file, lineterminator="\n").writerows([keys, *([row.get(key) for key in keys] for row in table.rows)])
    return file.getvalue()
