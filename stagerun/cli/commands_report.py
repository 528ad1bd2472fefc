"""`stagerun report`."""

import click

from stagerun.cli.ending import guarded

FORMATS = ("markdown", "csv", "tsv", "html")
TABLES = ("run", "stage", "epoch", "life", "ensemble", "seed", "workers")


@click.command()
@click.argument("outs", metavar="OUT...", nargs=-1, required=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="csv and tsv hold one table, at full precision; html has curves too (pip install 'stagerun[plots]').  "
    "[default: by the ending of --output, else markdown]",
)
@click.option("--output", metavar="FILE", help="Write there instead of to the terminal.")
@click.option(
    "--by",
    type=click.Choice(TABLES),
    help="One table alone: a row per run, stage, epoch or process life; ensembles beside their members; mean and spread over "
    "seeds; speed by number of workers.  [default: all that say something; stage in csv and tsv]",
)
@click.option(
    "--op",
    type=click.Choice(("mean", "max")),
    help="With --by epoch: one row per epoch over all runs, the mean or the largest of each number.",
)
@click.option(
    "--diff", is_flag=True, help="Name what differed between the runs, per stage; in csv and tsv, that alone."
)
@guarded
def report(
    outs: tuple[str, ...], form: str | None, output: str | None, by: str | None, op: str | None, diff: bool
) -> None:
    """Tables and curves of one or more output folders of `run`: stages, resumes, seeds, workers.

    Only reads, also while the run goes on. OUT is ./out/NAME, or what `run --out` named. Runs that are alike but for the
    seed are put together: mean, standard deviation (n - 1), least and largest top-1 of each stage.

    --by epoch is the table of MXNet's parse_log.py (epoch, train accuracy, valid accuracy, time), with the train loss in
    place of the train accuracy, which is not measured here; valid accuracy stands where an epoch had an evaluation
    (`test_interval`, and the end of each stage).
    """
    from stagerun.cli.reporting import ReportOptions, report_command

    click.echo(report_command(ReportOptions(outs, form, output, by, op, diff)), nl=False)
