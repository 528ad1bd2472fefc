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

# Usage, module:function, and one line of help, in the order of their use. Of a group: what it holds is in GROUPS.
COMMANDS: Rows = (
    ("new NAME", "stagerun.tools.new.command:new", "a schedule for your own images, from the gallery"),
    ("check DIR", "stagerun.tools.plan.check:check", "every mistake in the files at once, and what looks wrong"),
    ("fmt DIR", "stagerun.tools.fmt.command:fmt", "one style for solver files, their comments kept"),
    (
        "lsp",
        "stagerun.tools.lsp.command:lsp",
        "an editor's help with them: mistakes as you type, the manual, completion",
    ),
    (
        "plan DIR",
        "stagerun.tools.plan.command:plan",
        "what will run: stages, epochs, learning rate, joints; --why: one setting",
    ),
    ("view DIR", "stagerun.tools.view.command:view", "a page of all this and its run, which follows both"),
    ("diff A B", "stagerun.tools.diff.command:diff", "in what two schedules differ, or a schedule and a run"),
    (
        "rehearse DIR",
        "stagerun.tools.rehearse.command:rehearse",
        "all stages with a few iterations, and what the real run will take",
    ),
    (
        "verify DIR|OUT",
        "stagerun.tools.verify.command:verify",
        "proof of a run by its log, or that a killed run goes on to the same bits here",
    ),
    ("run DIR", "stagerun.train.command:run", "runs what is not yet done; the same command goes on after anything"),
    ("sbatch DIR", "stagerun.tools.slurm.command:sbatch", "the same in allocations of Slurm, as many as it takes"),
    (
        "retry -- COMMAND",
        "stagerun.tools.retry.command:retry",
        "starts a launcher's command, and anew when a worker was lost",
    ),
    (
        "status DIR",
        "stagerun.tools.status.command:status",
        "whether a run is alive, how far it is, its warnings; its snapshots",
    ),
    ("eval SNAPSHOT", "stagerun.tools.weights.evaluate:evaluate", "top-1, top-5 and loss of what was trained"),
    ("predict SNAPSHOT IMAGE...", "stagerun.tools.weights.predict:predict", "what it says of pictures"),
    ("export SNAPSHOT", "stagerun.tools.weights.export:export", "its network as safetensors, for torch, or as ONNX"),
    ("report OUT", "stagerun.tools.report.command:report", "tables and curves of one run or several"),
    ("data ...", "", "makes, checks and shows the LMDBs that it reads"),
    ("import caffe ...", "", "makes a schedule of Caffe's solver files"),
    (
        "help [PAGE]",
        "stagerun.manual.command:help_command",
        "the manual: its pages, and every field of the solver files",
    ),
    ("completion SHELL", "stagerun.tools.lsp.command:completion", "what bash, zsh or fish needs to complete all this"),
)
# The text of --help, and rows as above.
GROUPS: dict[str, tuple[str, Rows]] = {
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
                "show",
                "stagerun.tools.data.show:show_images",
                "A contact sheet of records, or of what a stage makes of them.",
            ),
        ),
    ),
    "import": (
        "Makes a schedule's folder of another program's files. (Images become LMDBs with `stagerun data import`.)",
        (("caffe", "stagerun.caffe.importer.command:caffe", "Makes a schedule of Caffe's solver files and nets."),),
    ),
}
# What people of other programs, or of stagerun before 1.0, type; and what to type now.
INSTEAD = {
    "train": "`stagerun run DIR` trains",
    "resume": "`stagerun run DIR`, the same command, goes on",
    "test": "`stagerun eval` evaluates",
    "topology": "It was retired: `stagerun run DIR --bind numa` places workers",
    "data stage": "It was retired: `stagerun run` has each node copy its images to `scratch`",
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

_GOES_ON = "the same command goes on where a run stopped"
OPTIONS_INSTEAD = {
    **dict.fromkeys(("--resume", "--continue", "--restart", "--snapshot"), _GOES_ON),
    "--workers-per-node": "with --hosts, --nproc is the number of workers on each",
    "--remote-python": "the hosts need this interpreter at the same path",
    **dict.fromkeys(
        ("--min-nodes", "--max-restarts"), "it was retired: `stagerun retry -- stagerun run DIR --hosts FILE`"
    ),
    "--sync-code": "it was retired: install stagerun on the hosts",
    "--watch": "it was retired: `stagerun view DIR` follows",
    "--paired": "it was retired: `stagerun report OUT --format csv` has the numbers",
    "--op": "it was retired: `stagerun report OUT... --by epoch --format csv` has the numbers",
    "--log-format": "it was retired: `stagerun report OUT --format caffe` writes Caffe's log",
    "--notify": "it was retired: `stagerun run DIR; COMMAND` runs COMMAND at the end, with the exit code in `$?`",
    "--images-per-second": "`stagerun plan DIR --images-per-second N --budget TIME` says how many allocations it takes",
    "--output": "`run` has --out; what other commands write goes to stdout: `> FILE`",
    "--csv": "it was retired: --json has the same",
    "--random": "it was retired: `--first K`; what `stagerun data import` writes is shuffled",
    **dict.fromkeys(
        ("--batch-size", "--device-batch-size", "--classes", "--train-source", "--val-source"),
        "it is a field of schedule.prototxt, also in what `import caffe` writes",
    ),
    "--lint": "findings are always shown, and fail with --strict",
    "--model": "the network is `model` in schedule.prototxt, also in what `import caffe` writes",
    "--root": "it was retired: copy the nets beside the solver files, and write absolute paths to the images",
    "--no-nets": "it was retired: give a net that `net` names, and change `model` in the written schedule.prototxt",
    "--keep": "it was retired: undo the edit of the stage, which `stagerun plan` names, or --redo the stage",
}


class Group(click.Group):
    """Commands of a table. A mistake on the command line ends with exit code 64, and a hint at the nearest name."""

    def __init__(self, name: str, rows: Rows, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.rows = {usage.split()[0]: (place, line) for usage, place, line in rows}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.rows)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.rows:
            if ctx.resilient_parsing:  # a shell completes what comes after it
                return None
            words = name if self.rows.get("run") else f"{self.name} {name}"
            ctx.fail(
                f"No such command {name!r}. {INSTEAD.get(words) or nearest(name, self.rows).capitalize()}".rstrip()
            )
        place, _ = self.rows[name]
        if not place:
            about, rows = GROUPS[name]
            return Group(name, rows, help=about)
        module, _, function = place.partition(":")
        with signals.held():  # numpy's library starts threads
            command: click.Command | None = wing(f"{module.removeprefix('stagerun.')}.{function}")
        if command is None:
            ctx.fail(f"this installation lacks {'/'.join(module.split('.')[:2])}: install all of stagerun")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.rows.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing them, too."""
        rows = self.rows.items()
        found = [CompletionItem(name, help=line) for name, (_, line) in rows if name.startswith(incomplete)]
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
