"""Wings: features that most runs don't use, each whole in a folder. The trunk knows one by its rows in tables of names, and looks them up
here; without the folder everything else works."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def wing(name: str) -> Any:
    """What `FOLDER.MODULE.NAME` of the package is; None where the folder is missing."""
    module, _, member = f"stagerun.{name}".rpartition(".")
    if find_spec(module.rpartition(".")[0]) is None:
        return None
    return getattr(import_module(module), member)
