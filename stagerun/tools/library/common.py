"""What functions of the library take in several forms."""

import os
from collections.abc import Iterable, Sequence

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Schedule
from stagerun.language import load

Folder = str | os.PathLike[str]
Names = str | Sequence[str]


def names_of(given: Names) -> tuple[str, ...]:
    """One name, or several. UsageError for anything else."""
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if all(isinstance(name, str) for name in names):
        return names
    raise UsageError(f"{given!r} is neither a text nor several", 'write "NAME", or ["NAME", "NAME"]')


def require_name(until: str | None) -> None:
    """UsageError where `until` isn't one name."""
    if until is not None and not isinstance(until, str):
        raise UsageError(f"until={until!r}: one stage's name is wanted", "`only` takes several names")


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
