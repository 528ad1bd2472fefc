"""Arguments and options that several commands share."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from stagerun import units
from stagerun.errors import Problem, RecipeError, Span, UsageError, listing, nearest
from stagerun.pulse import LEAST_S, Limits, Section
from stagerun.recipe import Data

# Of --bind.
AUTO, CORES, NONE = BIND = ("auto", "cores", "none")


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


def _no_folder(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A word after --plot is its FILE: `plan --plot DIR` would draw into DIR, and miss its DIR."""
    if value is not None and os.path.isdir(value):
        words = f"plan {value}" if ctx.info_name == "plan" else f"{ctx.info_name} A B"
        raise click.BadParameter(f"{value} is a folder: write `stagerun {words} --plot`.", ctx, param)
    return value


def choice_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--only and --until, which leave stages out."""
    for decorate in (
        click.option("--until", metavar="STAGE", help="Train up to this stage, it included, and nothing after it."),
        click.option(
            "--only",
            metavar="STAGE",
            multiple=True,
            help="Train this stage alone; what it starts from must be there. Repeatable.",
        ),
    ):
        command = decorate(command)
    return command


def plot_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--plot, --x, --scale and --watch."""
    watch = click.option(
        "--watch", "watched", is_flag=True, help="With --plot: draw again whenever a file is saved. Ctrl-C ends."
    )
    return picture_options(watch(command), hours=True)


def picture_options(command: Callable[..., Any], hours: bool = False) -> Callable[..., Any]:
    """--plot, --x and --scale."""
    for decorate in (
        click.option(
            "--scale",
            type=click.Choice(("log", "linear")),
            help="With --plot: of the learning rate.  [default: log where it falls far for long]",
        ),
        click.option(
            "--x",
            type=click.Choice(("iterations", "epochs", "images", *["hours"] * hours)),
            help="With --plot: what the x axis counts.  [default: epochs]",
        ),
        click.option(
            "--plot",
            "plot_file",
            is_flag=False,
            flag_value="-",
            metavar="[FILE]",
            callback=_no_folder,
            help="Also draw it, in the terminal or into FILE (.svg, .png, .html; pip install 'stagerun[plots]').",
        ),
    ):
        command = decorate(command)
    return command


class FiniteRange(click.FloatRange):
    """Click's own lets `nan` through, which is neither below nor above, and `inf` where there is no upper end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if not math.isfinite(click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{value} is no number.", param, ctx)
        return float(super().convert(value, param, ctx))


class Duration(click.ParamType):  # generic in a newer click alone
    """A length of time on the command line, in seconds; `least`: and no shorter."""

    name = "time"

    def __init__(self, least: float = 0.0) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = units.seconds(str(value))
        except ValueError:
            self.fail(f"{value!r} is no length of time: write 4h, 90m, 3h30m, 2d or 1:30:00.", param, ctx)
        if seconds < self.least:
            self.fail(f"{value} is too short: {self.least:g}s is the least.", param, ctx)
        return seconds


def limits(words: Sequence[str]) -> Limits | None:
    """What `--timeout SECTION=TIME ...` says; None for `off`. UsageError."""
    given: dict[Section, float] = {}
    names = [section.value for section in Section]
    for word in words:
        name, equals, time = (part.strip() for part in word.partition("="))
        if word.strip() == "off":
            if len(words) > 1:
                raise UsageError(
                    "--timeout off, and another --timeout", "`off` is for all sections: leave the others out"
                )
            return None
        if not equals and name in names:
            raise UsageError(f"--timeout {word}: how long is not said", f"write `--timeout {name}=5m`")
        if name not in names:
            hint = nearest(name, names) or f"write SECTION=TIME; the sections are {listing(names)}; or `off`"
            raise UsageError(f"--timeout {word}: there is no section `{name}`", hint)
        section = Section(name)
        if section in given:
            raise UsageError(f"--timeout {name} is given twice")
        try:
            given[section] = units.seconds(time)
        except ValueError:
            raise UsageError(
                f"--timeout {word}: `{time}` is no length of time", "write 90s, 5m, 2h or 1:30:00"
            ) from None
        if given[section] < LEAST_S:
            raise UsageError(
                f"--timeout {word} is too short", "on a busy machine, a process may wait for its turn that long"
            )
    return Limits(given)


def missing_data(data: Data) -> Iterator[str]:
    """A sentence for each LMDB that isn't on this machine, which may be a login node."""
    for field, source in (("data.train", data.train), ("data.val", data.val)):
        if source is not None and not os.path.exists(source.path):
            yield f"{field}: there is no LMDB at {source.path} on this machine; `run` will need it"


def output_folder(name: str, out: str | None) -> Path:
    return Path(out) if out is not None else Path("out") / name


def at_least(least: int, **given: int | None) -> None:
    """RecipeError for each option that is given and below `least`; `nproc=0` stands for --nproc 0."""
    problems = []
    for name, value in given.items():
        if value is not None and value < least:
            option = "--" + name.replace("_", "-")
            problems.append(
                Problem(
                    f"{option} must be {least} or more",
                    Span("argument", 1, len(option) + 2),
                    f"{option} {value}",
                )
            )
    if problems:
        raise RecipeError(problems)
