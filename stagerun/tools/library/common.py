"""What functions of the library take in several forms."""

import os
from collections.abc import Sequence

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.language import load

Folder = str | os.PathLike[str]
Names = str | Sequence[str]


def names_of(given: Names) -> tuple[str, ...]:
    """One name, or several."""
    return (given,) if isinstance(given, str) else tuple(given)


def schedule_of(given: Schedule | Folder, overrides: Names) -> Schedule:
    """A schedule, or that of a folder with `overrides`. RecipeError; UsageError for overrides of what is loaded."""
    if not isinstance(given, Schedule):
        return load(os.fspath(given), names_of(overrides))
    if overrides:
        raise UsageError(
            "`overrides` belong to a schedule's folder, and this is a schedule that is loaded",
            "give them to `stagerun.load`",
        )
    return given
