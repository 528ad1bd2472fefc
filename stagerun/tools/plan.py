"""`stagerun plan`: what `run` would do."""

from dataclasses import dataclass

import click

from stagerun.base.errors import UsageError
from stagerun.base.wings import require_wing
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import FASTEST, SLOWEST, Duration, FiniteRange, Json, PlannedOptions, output_folder
from stagerun.language import load
from stagerun.plan.render import csv_rows, render_json, render_text
from stagerun.system.files import writing
from stagerun.tools.check import weights_tables
from stagerun.tools.forecast import hours_blocks, notes
from stagerun.tools.lint import lint
from stagerun.tools.output import plan_of
from stagerun.train.keeper import Selection


@dataclass(frozen=True, slots=True)
class PlanOptions(PlannedOptions):
    folder: str = argument("[DIR]", default="")
    as_json: Json = False
    why: str | None = option(
        "--why STAGE.FIELD",
        "Instead: where a setting comes from, what it replaced and what it means. STAGE: all its fields; FIELD: in every stage, or of the "
        "schedule.",
    )
    net: str | None = option(
        "--net FILE", "Instead, without DIR: the layers of a Caffe net, their shapes, parameters and cost."
    )
    size: str | None = option("--size N|HxW|CxHxW", "Of the images of --net.  [default: what the net says]")
    images_per_second: float | None = option(
        "--images-per-second N",
        "Speed of training of the whole job, for the hours.  [default: as the last run or rehearsal here]",
        type=FiniteRange(SLOWEST, FASTEST),
    )
    allocation: float | None = option(
        "--budget TIME", "Where an allocation of 4h, 90m or 2d would end.", type=Duration()
    )
    csv_file: str | None = option("--csv FILE", "Write one row per iteration: lr, momentum, weight decay.")
    plot_file: str | None = option("--plot FILE.svg", "Also draw it.")
    weights: bool = flag(
        "--weights",
        "Which tensors each stage takes from elsewhere, draws at random and freezes. Reads the files' headers.",
    )


@command()
def plan(options: PlanOptions) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not. --why explains one setting of DIR; --net shows a net prototxt of Caffe's.
    """
    if options.net is not None:
        if options.folder:
            raise UsageError(f"--net {options.net}, and {options.folder} too", "leave one of them out")
        return show(require_wing("caffe.table.net_text")(options.net, options.size))
    if not options.folder:
        raise click.UsageError("Missing argument 'DIR'.")
    if options.size is not None:
        raise UsageError("--size without --net", "the size of a schedule's images is in its `transform_param`")
    schedule = load(options.folder, options.overrides)
    if options.why is not None:
        from stagerun.tools.why import explained

        return show(explained(schedule, options.why, options.overrides))
    out = output_folder(schedule.name, options.out)
    planned = plan_of(schedule, out, Selection(options.redo, options.only, options.until))
    if options.csv_file is not None:
        with writing(options.csv_file), open(options.csv_file, "w", encoding="utf-8") as file:
            file.writelines(csv_rows(planned))
    blocks, record = hours_blocks(planned, out, options.images_per_second, options.allocation)
    if options.weights:
        tables = weights_tables(schedule)
        blocks, record = [*blocks, *tables], {**record, "weights": tables}
    findings, lines = lint(schedule), list(notes(planned, out))
    if options.plot_file is not None:  # refused, if at all, before anything is printed
        picture = require_wing("look.picture.make_picture")(schedule)
        require_wing("look.chart.write_plot")(options.plot_file, picture)
    if options.as_json:
        show(render_json(planned, lines, record, findings))
    else:
        show(render_text(planned, lines, blocks, findings))
