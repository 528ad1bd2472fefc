"""`stagerun COMMAND`: arguments in, exit code out.

The modules named `commands_*` declare commands and import nothing heavy: what does the work is imported when it is called, and
torch only where workers compute.
"""

import os
import sys
from typing import Any

import click

import stagerun
from stagerun import text
from stagerun.cli.commands_agent import agent
from stagerun.cli.commands_bench import bench
from stagerun.cli.commands_data import data
from stagerun.cli.commands_import import import_group
from stagerun.cli.commands_look import snapshots, status
from stagerun.cli.commands_plan import check, diff, explain, help_command, new, plan
from stagerun.cli.commands_preflight import preflight
from stagerun.cli.commands_rehearse import rehearse
from stagerun.cli.commands_report import report
from stagerun.cli.commands_retry import retry
from stagerun.cli.commands_run import run
from stagerun.cli.commands_sbatch import sbatch
from stagerun.cli.commands_topology import topology
from stagerun.cli.commands_verify import verify_resume
from stagerun.cli.commands_weights import eval_command, export, predict
from stagerun.cli.ending import printable, tell, width_of
from stagerun.errors import EXIT_MEANINGS, ExitCode

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {int(code):3}  {text}" for code, text in EXIT_MEANINGS.items())


class Group(click.Group):
    """Click's group with exit code 64 for mistakes on the command line, and its own nearest-name hints."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """None: the text of `main` lists them, in the order of their use."""

    def get_help(self, ctx: click.Context) -> str:
        return text.wrapped(super().get_help(ctx), text.terminal())

    def main(self, *args: Any, **kwargs: Any) -> Any:
        text.terminal = lambda: width_of(sys.stdout)
        try:
            with printable():
                return self._main(*args, **kwargs)
        finally:
            text.terminal = text.no_terminal

    def _main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's libraries would end the process
            tell("the current folder has been deleted\n  hint: `cd` to one that is there")
            sys.exit(ExitCode.RECIPE)
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            error.show()
            sys.exit(ExitCode.RECIPE)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(ExitCode.INTERRUPTED)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(stagerun.__version__, prog_name="stagerun")
def main() -> None:
    """Trains a staged schedule, written as a folder of solver files, as one job.

    \b
    stagerun new NAME         a schedule for your own images, from the gallery
    stagerun check DIR        every mistake in the files at once
    stagerun plan DIR         what will run: stages, epochs, learning rate, joints
    stagerun explain DIR X.Y  where a setting came from, and what it means
    stagerun diff A B         in what two schedules differ, or a schedule and a run
    stagerun rehearse DIR     all stages with a few iterations, and what the real run will take
    stagerun preflight DIR    which host of a job is missing, slow or different, before it costs anything
    stagerun verify-resume DIR  proof that a killed run goes on to the same bits here
    stagerun run DIR          runs what is not yet done; the same command goes on after anything
    stagerun sbatch DIR       the same in allocations of Slurm, as many as it takes
    stagerun retry -- COMMAND starts a launcher's command, and anew when a worker was lost
    stagerun topology         this machine's cores, and which of them each worker gets
    stagerun status DIR       whether a run is alive, how far it is, its warnings
    stagerun snapshots DIR    what is saved, whole or damaged, and what started from it
    stagerun eval SNAPSHOT    top-1, top-5 and loss of what was trained
    stagerun predict SNAPSHOT IMAGE...  what it says of pictures
    stagerun export SNAPSHOT  its network as safetensors, for torch, or as ONNX
    stagerun report OUT       tables and curves of one run or several
    stagerun bench ...        speed and efficiency by number of workers
    stagerun data ...         makes, checks and shows the LMDBs that it reads
    stagerun import caffe ... makes a schedule of Caffe's solver files
    stagerun help FIELD       the manual of the solver files
    """


COMMANDS = (
    new,
    check,
    plan,
    explain,
    diff,
    rehearse,
    preflight,
    verify_resume,
    run,
    retry,
    sbatch,
    topology,
    status,
    snapshots,
    eval_command,
    predict,
    export,
    report,
    bench,
    data,
    import_group,
    help_command,
    agent,
)
for command in COMMANDS:
    main.add_command(command)
