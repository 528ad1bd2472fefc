"""`stagerun COMMAND`: arguments in, exit code out. A command's module is imported when the command is called."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click
from click.shell_completion import CompletionItem

import stagerun
from stagerun.base import text
from stagerun.base.errors import ExitCode, nearest
from stagerun.base.wings import wing
from stagerun.command.ending import printable, tell, width_of
from stagerun.system import signals

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {int(code):3}  {code.meaning}" for code in ExitCode)

Rows = Sequence[tuple[str, str, str]]

# Usage, module:function ('' for a row of GROUPS), and one line of help, in the order of use.
COMMANDS: Rows = (
    ("new NAME", "stagerun.tools.new:new", "write a schedule for your images from the gallery"),
    (
        "check DIR",
        "stagerun.tools.check:check",
        "list all mistakes in the solver files at once, and suspicious settings",
    ),
    ("fmt DIR", "stagerun.tools.fmt:fmt", "format solver files in one style, with their comments"),
    (
        "lsp",
        "stagerun.tools.lsp:lsp",
        "serve an editor: mistakes as you type, the manual, completion",
    ),
    (
        "plan DIR",
        "stagerun.tools.forecast:plan_command",
        "show what will run: stages, epochs, learning rates, joints; --why explains one setting",
    ),
    ("view DIR", "stagerun.look.view:view", "open a page that follows a schedule and its run"),
    ("diff A B", "stagerun.tools.diff:diff", "compare schedules, or runs"),
    (
        "rehearse DIR",
        "stagerun.tools.rehearse:rehearse",
        "try all stages for a few iterations; estimate time, memory and disk of the run",
    ),
    (
        "verify DIR|OUT",
        "stagerun.tools.verify:verify",
        "prove a run by its log, or that a killed run resumes to the same bits",
    ),
    ("run DIR", "stagerun.train.command:run", "train what is not trained yet; the same command resumes after anything"),
    ("sbatch DIR", "stagerun.tools.sbatch:sbatch", "write a Slurm job that trains in as many allocations as needed"),
    (
        "retry -- COMMAND",
        "stagerun.tools.retry:retry",
        "run a launcher's command, and restart it after a lost worker",
    ),
    (
        "status DIR",
        "stagerun.tools.status:status",
        "show whether a run is alive, its progress and warnings; --snapshots lists them",
    ),
    ("eval SNAPSHOT", "stagerun.tools.weights.evaluate:evaluate", "evaluate a snapshot: top-1, top-5, loss"),
    ("predict SNAPSHOT IMAGE...", "stagerun.tools.weights.predict:predict", "classify images with a snapshot"),
    (
        "export SNAPSHOT FILE",
        "stagerun.tools.weights.export:export",
        "write a snapshot's network as safetensors, torch, ONNX or caffemodel",
    ),
    ("report OUT", "stagerun.look.report:report_command", "print the results of one run or several"),
    ("data ...", "", "make, verify and show LMDBs of images"),
    ("import caffe ...", "", "convert Caffe's solver files to a schedule"),
    (
        "help [PAGE]",
        "stagerun.manual.fields:help_command",
        "show a page of the manual, or explain a field of the solver files",
    ),
    ("completion SHELL", "stagerun.tools.lsp:completion", "print the completion script for bash, zsh or fish"),
)
# The text of --help, and rows as above.
GROUPS: dict[str, tuple[str, Rows]] = {
    "data": (
        """Make, verify and show the LMDBs that a schedule reads.

        Lines like `libpng warning: ...` or `Corrupt JPEG data: ...` come from the libraries that decode. Ignore
        them: stagerun names the images that can't be used.""",
        (
            (
                "import",
                "stagerun.tools.data.importer:import_images",
                "Make an LMDB from class folders, lists, ImageNet's archives or published sets.",
            ),
            (
                "info",
                "stagerun.tools.data.records:info",
                "Print counts, sizes and classes, and the decoders of this machine.",
            ),
            (
                "verify",
                "stagerun.tools.data.records:verify",
                "Check every byte against its digest; make missing side files.",
            ),
            (
                "show",
                "stagerun.tools.data.show:show_images",
                "Draw a contact sheet of records, or of a stage's transforms of them.",
            ),
        ),
    ),
    "import": (
        "Convert another program's files to a schedule. (For images use `stagerun data import`.)",
        (("caffe", "stagerun.caffe.importer.command:caffe", "Convert Caffe's solver files and nets to a schedule."),),
    ),
}
# Commands of other programs and of stagerun before 1.0, and today's.
INSTEAD = {
    "train": "`stagerun run DIR` trains",
    "resume": "`stagerun run DIR`, the same command, resumes",
    "test": "`stagerun eval` evaluates",
    "topology": "It was retired: `stagerun run DIR --bind numa` places workers",
    "data stage": "It was retired: `stagerun run` has each node copy its images to `scratch`",
    "data index": "It was retired: `stagerun data verify DIR --index`",
    "data prepare": "It was retired: `stagerun data import DIR OUT --prepare`",
    "data unstage": "It was retired: remove the folder SCRATCH/stagerun-UID",
    "bench": "It was retired: `stagerun rehearse DIR --workers 1,2,4` compares numbers of workers",
    "fetch": "It was retired: `stagerun check DIR --fetch`",
    "verify-run": "It was retired: `stagerun verify OUT`, or `stagerun verify DIR --out OUT`",
    "verify-resume": "It was retired: `stagerun verify DIR`",
    "snapshots": "It was retired: `stagerun status DIR --snapshots`",
    "explain": "It was retired: `stagerun plan DIR --why STAGE.FIELD`",
    "show": "It was retired: `stagerun plan --net FILE`",
    "find-lr": "It was retired: `stagerun rehearse DIR --find-lr STAGE`",
    "preflight": "It was retired: `stagerun rehearse DIR --hosts FILE`",
}

_RESUMES = "the same command resumes where a run stopped"
OPTIONS_INSTEAD = {
    **dict.fromkeys(("--resume", "--continue", "--restart", "--snapshot"), _RESUMES),
    "--workers-per-node": "with --hosts, --nproc is the number of workers on each",
    **dict.fromkeys(
        ("--min-nodes", "--max-restarts"), "it was retired: `stagerun retry -- stagerun run DIR --hosts FILE`"
    ),
    "--diff": "`stagerun diff OUT OUT` shows where two runs differ",
    "--log-format": "it was retired: `stagerun report OUT --format caffe` writes Caffe's log",
    "--notify": "it was retired: `stagerun run DIR; COMMAND` runs COMMAND at the end, with the exit code in `$?`",
    "--images-per-second": "`stagerun plan DIR --images-per-second N --budget TIME` says how many allocations it takes",
    "--output": "`run` has --out, and `export` takes FILE after SNAPSHOT; what other commands write goes to stdout: `> FILE`",
    "--plot": "`stagerun plan DIR --plot FILE.svg` draws a schedule, `stagerun report OUT --plot FILE.svg` a run",
    **dict.fromkeys(
        ("--batch-size", "--device-batch-size", "--classes", "--train-source", "--val-source"),
        "it is a field of schedule.prototxt, also in what `import caffe` writes",
    ),
    "--model": "the network is `model` in schedule.prototxt, also in what `import caffe` writes",
    **dict.fromkeys(
        ("--safetensors", "--torch", "--onnx", "--caffemodel"),
        "it was retired: the ending of FILE says the format, `stagerun export SNAPSHOT net.onnx`",
    ),
}


class Group(click.Group):
    """Commands of a table. A mistake on the command line ends with exit code 64 and the nearest name as a hint."""

    def __init__(self, name: str, rows: Rows, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.rows = {usage.split()[0]: (target, line) for usage, target, line in rows}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.rows)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.rows:
            if ctx.resilient_parsing:  # a shell completes the words after it
                return None
            words = name if self.rows.get("run") else f"{self.name} {name}"
            ctx.fail(
                f"No such command {name!r}. {INSTEAD.get(words) or nearest(name, self.rows).capitalize()}".rstrip()
            )
        target, _ = self.rows[name]
        if not target:
            about, rows = GROUPS[name]
            return Group(name, rows, help=about)
        module, _, function = target.partition(":")
        with signals.held():  # numpy's library starts threads
            command: click.Command | None = wing(f"{module.removeprefix('stagerun.')}.{function}")
        if command is None:
            ctx.fail(f"this installation lacks {'/'.join(module.split('.')[:2])}: install all of stagerun")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands without importing them."""
        rows = self.rows.items()
        commands = [CompletionItem(name, help=line) for name, (_, line) in rows if name.startswith(incomplete)]
        return commands + click.Command.shell_complete(self, ctx, incomplete)  # its options


class Main(Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print nothing: the help text of `main` lists the commands."""

    def get_help(self, ctx: click.Context) -> str:
        return text.wrapped(super().get_help(ctx), text.terminal())

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # A shell's completion reads bytes, not a terminal.
        shown = nullcontext() if "_STAGERUN_COMPLETE" in os.environ else printable()
        with text.printing_on(lambda: width_of(sys.stdout)), shown:
            return self._main(*args, **kwargs)

    def _main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            os.getcwd()
        except FileNotFoundError:  # torch's libraries would end the process
            tell("the current folder has been deleted\n  hint: `cd` to an existing one")
            sys.exit(ExitCode.RECIPE)
        try:
            return super().main(*args, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            if isinstance(error, click.NoSuchOption) and (now := OPTIONS_INSTEAD.get(error.option_name)):
                error = click.UsageError(f"No such option {error.option_name!r}: {now}", error.ctx)
            error.show()
            sys.exit(ExitCode.RECIPE)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except click.Abort:
            sys.exit(ExitCode.INTERRUPTED)


_USES = "\n".join(f"stagerun {usage:15}  {line}" for usage, _, line in COMMANDS)
_PATHS = [usage.split()[0] for usage, _, _ in COMMANDS] + [
    f"{group} {usage.split()[0]}" for group, (_, rows) in GROUPS.items() for usage, _, _ in rows
]

main = Main(
    "main",
    COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "obj": {**dict.fromkeys(_PATHS, ""), **INSTEAD}},
    help=f"Trains a staged schedule, written as a folder of solver files, as one job.\n\n\b\n{_USES}",
    epilog=EXIT_CODES,
)
main = click.version_option(stagerun.__version__, prog_name="stagerun")(main)
