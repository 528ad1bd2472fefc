"""`stagerun COMMAND`: arguments in, exit code out. Torch is imported only where workers train."""

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

import stagerun
from stagerun.errors import EXIT_MEANINGS, ExitCode, Problem, RecipeError, Span, StagerunError

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {int(code):3}  {text}" for code, text in EXIT_MEANINGS.items())


def show(error: StagerunError) -> None:
    if text := error.render():
        click.echo(text, err=True)


def end_with(error: BaseException) -> NoReturn:
    """Shows an error the way a user should see it, and exits with its code. Our own bugs keep their traceback in a file."""
    if isinstance(error, StagerunError):
        show(error)
        sys.exit(error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(ExitCode.INTERRUPTED_TWICE)
    if isinstance(error, BrokenPipeError):  # `stagerun plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    click.echo(bug_report(error), err=True)
    sys.exit(ExitCode.BUG)


def bug_report(error: BaseException) -> str:
    """One message for an exception that no user should ever meet; the traceback goes to a file beside it."""
    path = Path(f"stagerun-bug-{os.getpid()}.txt")
    text = "".join(traceback.format_exception(error))
    try:
        path.write_text(f"stagerun {stagerun.__version__}, Python {sys.version}\n{' '.join(sys.argv)}\n\n{text}")
        where = f"please report it with {path.absolute()}"
    except OSError:
        where = f"please report it with these lines:\n{text}"
    return f"this is a bug of stagerun: {type(error).__name__}: {error}\n  hint: {where}"


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.exceptions.Exit, click.ClickException, click.Abort, SystemExit):
            raise
        except BaseException as error:
            end_with(error)

    return wrapper


class Group(click.Group):
    """Click's group with exit code 64 for mistakes on the command line, and its own nearest-name hints."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            sys.exit(ExitCode.RECIPE)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(ExitCode.INTERRUPTED_TWICE)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(stagerun.__version__, prog_name="stagerun")
def main() -> None:
    """Trains a staged schedule, written as a folder of solver files, as one job.

    \b
    stagerun check DIR    every mistake in the files at once
    stagerun plan DIR     what will run: stages, epochs, learning rate, joints
    stagerun run DIR      runs what is not yet done; the same command goes on after anything
    stagerun help FIELD   the manual of the solver files
    """


def schedule_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """DIR and --set, which every command that reads a schedule has."""
    command = click.option(
        "--set",
        "overrides",
        metavar="STAGE.FIELD=VALUE",
        multiple=True,
        help="Change a field for this command: `cyc2.base_lr=0.5`, `seed=3`, `data.train.source=/x`. Repeatable.",
    )(command)
    return click.argument("folder", metavar="DIR")(command)


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--out, --redo and --keep, which say what is done already."""
    for decorate in (
        click.option("--keep", metavar="STAGE", multiple=True, help="Keep a stale stage's snapshots as they are."),
        click.option(
            "--redo", metavar="STAGE", multiple=True, help="Train a stale stage, and what follows from it, again."
        ),
        click.option("--out", metavar="FOLDER", help="Output folder.  [default: ./out/NAME]"),
    ):
        command = decorate(command)
    return command


def output_folder(name: str, out: str | None) -> Path:
    return Path(out) if out is not None else Path("out") / name


@main.command()
@schedule_options
@guarded
def check(folder: str, overrides: tuple[str, ...]) -> None:
    """Finds every mistake in a schedule's files at once, in a fraction of a second. Trains nothing."""
    from stagerun.spec import digest, load

    schedule = load(folder, overrides)
    click.echo(
        f"{schedule.name}: {len(schedule.stages)} stages, "
        f"{sum(s.solver.max_iter for s in schedule.stages)} iterations, no mistakes, digest {digest(schedule)[:12]}"
    )


@main.command()
@schedule_options
@output_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write one row per iteration: lr, momentum, weight decay.")
@guarded
def plan(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    as_json: bool,
    csv_file: str | None,
) -> None:
    """Shows what `run` would do: stages, epochs, learning rate, joints, and what is done already.

    Works where the data is not.
    """
    from stagerun.cli.planning import remarks, write_csv
    from stagerun.plan import make_plan
    from stagerun.plan.render import render_json, render_text
    from stagerun.spec import load
    from stagerun.store import LocalDisk, inventory

    schedule = load(folder, overrides)
    target = output_folder(schedule.name, out)
    found = inventory(LocalDisk(), target)
    planned = make_plan(schedule, found, redo, keep)
    if csv_file is not None:
        write_csv(planned, csv_file)
    notes = remarks(planned, target, found.damaged)
    click.echo(render_json(planned, notes) if as_json else render_text(planned, notes))


@main.command()
@schedule_options
@output_options
@click.option("--nproc", type=int, metavar="N", help="Workers on this machine.  [default: one per GPU, or 1]")
@click.option("--threads", type=int, metavar="N", help="Threads per worker.  [default: the processors shared evenly]")
@guarded
def run(
    folder: str,
    overrides: tuple[str, ...],
    out: str | None,
    redo: tuple[str, ...],
    keep: tuple[str, ...],
    nproc: int | None,
    threads: int | None,
) -> None:
    """Trains what is not yet done. The same command goes on after a kill, a crash or a full disk.

    On this machine it starts --nproc workers itself. Under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT (torchrun, say) it joins as one worker.
    """
    from stagerun.cli.running import RunOptions, run_command

    for name, value, least in (("--nproc", nproc, 1), ("--threads", threads, 1)):
        if value is not None and value < least:
            text = f"{name} {value}"
            raise RecipeError([Problem(f"{name} must be {least} or more", Span("argument", 1, len(name) + 2), text)])
    sys.exit(run_command(RunOptions(folder, overrides, out, redo, keep, nproc, threads)))


@main.command("help")
@click.argument("name", metavar="[FIELD]", default="")
@guarded
def help_command(name: str) -> None:
    """Prints the manual of a field, a message or an enum of the solver files; of nothing, an overview."""
    from stagerun.spec.manual import help_text

    click.echo(help_text(name))
