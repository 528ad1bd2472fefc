"""Wings: features that most runs don't use, each whole in a folder. The trunk knows one by its rows in tables of names, and looks them up
here; without the folder everything else works."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stagerun.base.errors import UsageError


@cache
def wing(name: str) -> Any:
    """What `FOLDER.MODULE.NAME` of the package is; None where the folder is missing."""
    module, _, member = f"stagerun.{name}".rpartition(".")
    folders = module.split(".")
    if any(find_spec(".".join(folders[:n])) is None for n in range(2, len(folders))):
        return None
    return getattr(import_module(module), member)


def require_wing(name: str) -> Any:
    """Return the same. UsageError if the folder is missing."""
    found = wing(name)
    if found is None:
        raise UsageError(f"this installation lacks stagerun/{name.partition('.')[0]}", "install all of stagerun")
    return found
