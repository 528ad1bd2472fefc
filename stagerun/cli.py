"""`stagerun COMMAND`: arguments in, exit code out. A command's module is imported when the command is called."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import click
from click.shell_completion import CompletionItem

import stagerun
from stagerun.base import text
from stagerun.base.errors import EXIT_MEANINGS, ExitCode, nearest
from stagerun.command.ending import printable, tell, width_of
from stagerun.system import signals

EXIT_CODES = "\b\nExit codes:\n" + "\n".join(f"  {int(code):3}  {text}" for code, text in EXIT_MEANINGS.items())

Rows = Sequence[tuple[str, str, str]]

# Usage, module:function, and one line of help, in the order of their use. Of a group: what it holds is in GROUPS.
COMMANDS: Rows = (
    ("new NAME", "stagerun.tools.new.command:new", "a schedule for your own images, from the gallery"),
    ("check DIR", "stagerun.tools.plan.check:check", "every mistake in the files at once"),
    ("fmt DIR", "stagerun.tools.fmt.command:fmt", "one style for solver files, their comments kept"),
    (
        "lsp",
        "stagerun.tools.lsp.command:lsp",
        "an editor's help with them: mistakes as you type, the manual, completion",
    ),
    ("plan DIR", "stagerun.tools.plan.command:plan", "what will run: stages, epochs, learning rate, joints"),
    ("view DIR", "stagerun.tools.view.command:view", "a page of all this and its run, which follows both"),
    ("explain DIR X.Y", "stagerun.tools.explain.command:explain", "where a setting came from, and what it means"),
    ("diff A B", "stagerun.tools.diff.command:diff", "in what two schedules differ, or a schedule and a run"),
    (
        "rehearse DIR",
        "stagerun.tools.rehearse.command:rehearse",
        "all stages with a few iterations, and what the real run will take",
    ),
    (
        "find-lr DIR STAGE",
        "stagerun.tools.find_lr.command:find_lr",
        "the loss over growing rates, from a stage's start",
    ),
    (
        "preflight DIR",
        "stagerun.tools.preflight.command:preflight",
        "which host of a job is missing, slow or different, before it costs anything",
    ),
    (
        "verify-resume DIR",
        "stagerun.tools.verify_resume.command:verify_resume",
        "proof that a killed run goes on to the same bits here",
    ),
    (
        "verify-run DIR",
        "stagerun.tools.verify_run.command:verify_run",
        "proof that a run's weights come from its schedule and images: parts of it are trained again",
    ),
    ("fetch DIR", "stagerun.tools.weights.fetch:fetch", "downloads the published weights that its stages start from"),
    ("run DIR", "stagerun.train.command:run", "runs what is not yet done; the same command goes on after anything"),
    ("sbatch DIR", "stagerun.tools.slurm.command:sbatch", "the same in allocations of Slurm, as many as it takes"),
    (
        "retry -- COMMAND",
        "stagerun.tools.retry.command:retry",
        "starts a launcher's command, and anew when a worker was lost",
    ),
    ("status DIR", "stagerun.tools.status.command:status", "whether a run is alive, how far it is, its warnings"),
    (
        "snapshots DIR",
        "stagerun.tools.status.snapshots:snapshots",
        "what is saved, whole or damaged, and what started from it",
    ),
    ("eval SNAPSHOT", "stagerun.tools.weights.evaluate:evaluate", "top-1, top-5 and loss of what was trained"),
    ("predict SNAPSHOT IMAGE...", "stagerun.tools.weights.predict:predict", "what it says of pictures"),
    ("export SNAPSHOT", "stagerun.tools.weights.export:export", "its network as safetensors, for torch, or as ONNX"),
    ("report OUT", "stagerun.tools.report.command:report", "tables and curves of one run or several"),
    ("bench ...", "", "speed by number of workers; accuracy by compression of the gradients"),
    ("data ...", "", "makes, checks and shows the LMDBs that it reads"),
    ("import caffe ...", "", "makes a schedule of Caffe's solver files"),
    (
        "show NET",
        "stagerun.tools.show.command:show",
        "a net prototxt of Caffe's: its layers, shapes, parameters and cost",
    ),
    (
        "help [PAGE]",
        "stagerun.manual.command:help_command",
        "the manual: its pages, and every field of the solver files",
    ),
    ("completion SHELL", "stagerun.command.completion:completion", "what bash, zsh or fish needs to complete all this"),
)
# The text of --help, and rows as above.
GROUPS: dict[str, tuple[str, Rows]] = {
    "bench": (
        "Measures on the machines at hand.",
        (
            (
                "scaling",
                "stagerun.tools.bench.command:scaling",
                "Speed and efficiency with 1, 2, 4 ... workers, and where the time goes.",
            ),
            (
                "compression",
                "stagerun.tools.bench.compression:compression",
                "Accuracy, bytes and time of a stage by each method of compress_param.",
            ),
        ),
    ),
    "data": (
        """Makes, checks and shows the LMDBs that a schedule reads.

        Lines like `libpng warning: ...` or `Corrupt JPEG data: ...` come from the libraries that decode. They name no image and need
        no answer: stagerun itself says which images can't be used.""",
        (
            (
                "import",
                "stagerun.tools.data.importer:import_images",
                "Makes an LMDB from class folders, lists, ImageNet's archives, published sets.",
            ),
            ("index", "stagerun.tools.data.index:index", "Makes the side file of an LMDB that Caffe wrote."),
            ("info", "stagerun.tools.data.index:info", "Counts, sizes, classes, and how fast it can be read here."),
            ("verify", "stagerun.tools.data.index:verify", "Every byte against its digest."),
            (
                "prepare",
                "stagerun.tools.data.importer:prepare",
                "Arranges the JPEGs of an LMDB anew, losslessly, so that they decode faster.",
            ),
            (
                "show",
                "stagerun.tools.data.show:show_images",
                "A contact sheet of records, or of what a stage makes of them.",
            ),
            ("stage", "stagerun.tools.data.scratch:stage", "Copies LMDBs to this node's fast disk, ahead of a run."),
            (
                "unstage",
                "stagerun.tools.data.scratch:unstage",
                "Removes copies that stagerun made on this node's fast disk.",
            ),
        ),
    ),
    "import": (
        "Makes a schedule's folder of another program's files. (Images become LMDBs with `stagerun data import`.)",
        (("caffe", "stagerun.tools.caffe.command:caffe", "Makes a schedule of Caffe's solver files and nets."),),
    ),
}
HIDDEN: Rows = (("agent", "stagerun.train.agent:agent", "what `run --hosts` starts on each host"),)


# What people of other programs type.
_MEANT = {
    "train": "`stagerun run DIR` trains",
    "resume": "`stagerun run DIR`, the same command, goes on",
    "test": "`stagerun eval` evaluates",
    "topology": "It was retired: `stagerun run DIR --bind numa` places workers",
}


class Group(click.Group):
    """Commands of a table. A mistake on the command line ends with exit code 64, and a hint at the nearest name."""

    def __init__(self, name: str, rows: Rows, hidden: Rows = (), **settings: Any) -> None:
        super().__init__(name, **settings)
        self.shown = rows
        self.rows = {usage.split()[0]: (place, line) for usage, place, line in (*rows, *hidden)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.rows)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.rows:
            if ctx.resilient_parsing:  # a shell completes what comes after it
                return None
            hint = _MEANT.get(name, "") if self.rows.get("run") else ""
            ctx.fail(f"No such command {name!r}. {hint or nearest(name, self.rows).capitalize()}".rstrip())
        place, _ = self.rows[name]
        if not place:
            about, rows = GROUPS[name]
            return Group(name, rows, help=about)
        module, _, function = place.partition(":")
        with signals.held():  # numpy's library starts threads
            command: click.Command = getattr(import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing them, too."""
        names = ((usage.split()[0], line) for usage, _, line in self.shown)
        found = [CompletionItem(name, help=line) for name, line in names if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)  # its options


class Main(Group):
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """None: the text of `main` lists them, in the order of their use."""

    def get_help(self, ctx: click.Context) -> str:
        return text.wrapped(super().get_help(ctx), text.terminal())

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # What a shell asks is answered in bytes, and to no terminal.
        shown = nullcontext() if "_STAGERUN_COMPLETE" in os.environ else printable()
        with text.printing_on(lambda: width_of(sys.stdout)), shown:
            return self._main(*args, **kwargs)

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


_USES = "\n".join(f"stagerun {usage:15}  {line}" for usage, _, line in COMMANDS)
PATHS = [usage.split()[0] for usage, _, _ in COMMANDS] + [
    f"{group} {usage.split()[0]}" for group, (_, rows) in GROUPS.items() for usage, _, _ in rows
]

main = Main(
    "main",
    COMMANDS,
    HIDDEN,
    context_settings={"help_option_names": ["-h", "--help"], "obj": PATHS},
    help=f"Trains a staged schedule, written as a folder of solver files, as one job.\n\n\b\n{_USES}",
    epilog=EXIT_CODES,
)
main = click.version_option(stagerun.__version__, prog_name="stagerun")(main)
