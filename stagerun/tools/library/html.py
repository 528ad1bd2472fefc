"""What a notebook shows of a plan, a report and a run: without matplotlib the tables alone, and never an error."""

from pathlib import Path

from stagerun.base.errors import StagerunError, UsageError
from stagerun.drawing import notebook
from stagerun.drawing.html import inline
from stagerun.drawing.picture import Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.plan import Plan
from stagerun.plan.render import render_text, table_rows, title
from stagerun.tools.report.curves import WIDE, caption, draw
from stagerun.tools.report.history import Run
from stagerun.tools.report.look import look_at
from stagerun.tools.report.page import rows
from stagerun.tools.report.table import Table
from stagerun.tools.report.tables import stages_table

_NO_PICTURE = "pictures need matplotlib: pip install 'stagerun[plots]'"
_POINTS = 900


def plan_html(plan: Plan) -> str:
    head = notebook.note(title(plan))
    return notebook.cell(
        _schedule(plan), head, notebook.table(table_rows(plan)), notebook.folded("details", render_text(plan))
    )


def _schedule(plan: Plan) -> str:
    from stagerun.drawing.figure import draw as draw_picture
    from stagerun.drawing.figure import drawing, saved_svg

    picture = make_picture(plan.schedule)
    try:
        with drawing():
            drawn = draw_picture(picture, Unit.EPOCHS, make_scale(picture), paper="none")
            return inline(saved_svg(drawn.figure, picture.name), f"Learning rate of {picture.name} over its stages")
    except UsageError:
        return notebook.note(_NO_PICTURE)


def report_html(table: Table, runs: list[Run]) -> str:
    return notebook.cell(*_curves(runs), rows(table) if table.rows else "", *map(notebook.note, table.notes))


def run_html(out: Path) -> str:
    """The curves of the output folder so far, of earlier lives, too."""
    try:
        runs = [look_at(out, out.name, _POINTS, lambda text: None)]
    except StagerunError as error:
        return notebook.cell(notebook.note(error.render()))
    state = notebook.note(f"{runs[0].history.schedule or out.name}: {runs[0].state_in_words}")
    return notebook.cell(state, *_curves(runs), rows(stages_table(runs)))


def _curves(runs: list[Run]) -> list[str]:
    try:
        drawing = draw(runs, WIDE, runs[0].history.schedule or "run")
    except UsageError:
        return [notebook.note(_NO_PICTURE)]
    if drawing is None:
        return [notebook.note("no iteration was done yet")]
    return [drawing.svg, notebook.note(caption(runs))]
