"""The language: solver files -> recipe.Schedule, with every mistake at once; its canonical form and digest. No torch, no numpy.

`lexer` and `parse` make a tree, `stages` says which stages there are, `resolve` lays files over each other and finds what can't be trained
(`check*`), `build` and `identity` make the recipe, `disk` reads a folder. A field is a line in protos/stagerun.proto, with its range, and an attribute in base/recipe.py.
"""

from stagerun.language.code import Unreadable
from stagerun.language.disk import files_in, load
from stagerun.language.folders import look_at_classes, look_at_folders, require_folders
from stagerun.language.resolve import read, stage_nodes
from stagerun.language.values import canonical, digest

__all__ = [
    "Unreadable",
    "canonical",
    "digest",
    "files_in",
    "load",
    "look_at_classes",
    "look_at_folders",
    "read",
    "require_folders",
    "stage_nodes",
]
