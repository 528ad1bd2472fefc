"""`stagerun.report`: what output folders hold, as rows."""

import os

from stagerun.base.errors import UsageError, nearest
from stagerun.tools.library.plan import Folder
from stagerun.tools.report.command import TABLES
from stagerun.tools.report.look import look_at_all
from stagerun.tools.report.table import Table, Value, markdown


class Report(list[dict[str, Value]]):
    """A row for each line of a table of `stagerun report`, with the keys of its CSV: `pandas.DataFrame(report)` takes it as it is. Fractions
    are 0 to 1, times are seconds. As text it is the table."""

    def __init__(self, table: Table, notes: tuple[str, ...]) -> None:
        keys = [column.key for column in table.columns]
        super().__init__(dict(zip(keys, row, strict=True)) for row in table.rows)
        self.notes = notes  # what was passed over
        self._table = table

    def __str__(self) -> str:
        return markdown(self._table)


def report(outs: Folder | list[Folder] | tuple[Folder, ...], by: str = "stage") -> Report:
    """What was trained in one or more output folders, also while they train: a row per `run`, `stage`, `epoch`, process `life`, displayed
    `iteration`, `ensemble` or `seed`. UsageError for folders without a run."""
    folders = list(outs) if isinstance(outs, list | tuple) else [outs]
    if by not in TABLES:
        raise UsageError(
            f"report by {by!r}: there is no such table", nearest(by, TABLES) or f"there are {', '.join(TABLES)}"
        )
    notes: list[str] = []
    runs = look_at_all([os.fspath(out) for out in folders], notes.append)
    return Report(TABLES[by](runs), tuple(notes))
