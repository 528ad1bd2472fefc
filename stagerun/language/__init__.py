"""The language: solver files -> recipe.Schedule, with every mistake at once; its canonical form and digest. No torch, no numpy.

`lexer` and `parse` make a tree, `layers` and `resolve` lay files over each other, `check*` finds what can't be trained, `build` makes the
recipe. A field is a line in protos/stagerun.proto, with its range, and a row of `values.layout`.
"""

from stagerun.language.code import Unreadable
from stagerun.language.folders import look_at_folders, require_folders
from stagerun.language.resolve import files_in, load, look_at_classes, read, stage_files, stage_nodes
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
    "stage_files",
    "stage_nodes",
]
