"""Arguments and options that several commands share."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from stagerun.errors import Problem, RecipeError, Span


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


class FiniteRange(click.FloatRange):
    """Click's own lets `nan` through: it is neither below nor above."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


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
