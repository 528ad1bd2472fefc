"""`stagerun COMMAND`: arguments in, exit code out. A command's module is imported when the command is asked for."""

import os
import sys
from importlib import import_module
from typing import Any

import click

import stagerun
from stagerun import text
from stagerun.cli.ending import printable, tell, width_of
from stagerun.errors import EXIT_MEANINGS, ExitCode, nearest

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {int(code):3}  {text}" for code, text in EXIT_MEANINGS.items())

# Usage, module:function, and one line of help, in the order of their use. `commands_*` import nothing heavy: what does the work is
# imported when it is called, and torch only where workers compute.
COMMANDS = (
    ("new NAME", "commands_plan:new", "a schedule for your own images, from the gallery"),
    ("check DIR", "commands_plan:check", "every mistake in the files at once"),
    ("plan DIR", "commands_plan:plan", "what will run: stages, epochs, learning rate, joints"),
    ("explain DIR X.Y", "commands_plan:explain", "where a setting came from, and what it means"),
    ("diff A B", "commands_plan:diff", "in what two schedules differ, or a schedule and a run"),
    ("rehearse DIR", "commands_rehearse:rehearse", "all stages with a few iterations, and what the real run will take"),
    (
        "preflight DIR",
        "commands_preflight:preflight",
        "which host of a job is missing, slow or different, before it costs anything",
    ),
    ("verify-resume DIR", "commands_verify:verify_resume", "proof that a killed run goes on to the same bits here"),
    ("run DIR", "commands_run:run", "runs what is not yet done; the same command goes on after anything"),
    ("sbatch DIR", "commands_sbatch:sbatch", "the same in allocations of Slurm, as many as it takes"),
    ("retry -- COMMAND", "commands_retry:retry", "starts a launcher's command, and anew when a worker was lost"),
    ("topology", "commands_topology:topology", "this machine's cores, and which of them each worker gets"),
    ("status DIR", "commands_look:status", "whether a run is alive, how far it is, its warnings"),
    ("snapshots DIR", "commands_look:snapshots", "what is saved, whole or damaged, and what started from it"),
    ("eval SNAPSHOT", "commands_weights:eval_command", "top-1, top-5 and loss of what was trained"),
    ("predict SNAPSHOT IMAGE...", "commands_weights:predict", "what it says of pictures"),
    ("export SNAPSHOT", "commands_weights:export", "its network as safetensors, for torch, or as ONNX"),
    ("report OUT", "commands_report:report", "tables and curves of one run or several"),
    ("bench ...", "commands_bench:bench", "speed and efficiency by number of workers"),
    ("data ...", "commands_data:data", "makes, checks and shows the LMDBs that it reads"),
    ("import caffe ...", "commands_import:import_group", "makes a schedule of Caffe's solver files"),
    ("help [PAGE]", "commands_plan:help_command", "the manual: its pages, and every field of the solver files"),
)
_PLACES = {usage.split()[0]: place for usage, place, _ in COMMANDS} | {"agent": "commands_agent:agent"}


class Group(click.Group):
    """click's group with exit code 64 for mistakes on the command line, a hint at the nearest name, and commands of a table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _PLACES:
            ctx.fail(f"No such command {name!r}. {nearest(name, _PLACES).capitalize()}".rstrip())
        module, _, function = _PLACES[name].partition(":")
        command: click.Command = getattr(import_module(f"stagerun.cli.{module}"), function)
        return command

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


_USES = "\n".join(f"stagerun {usage:15}  {says}" for usage, _, says in COMMANDS)


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=f"Trains a staged schedule, written as a folder of solver files, as one job.\n\n\b\n{_USES}",
    epilog=EXIT_CODES,
)
@click.version_option(stagerun.__version__, prog_name="stagerun")
def main() -> None: ...
