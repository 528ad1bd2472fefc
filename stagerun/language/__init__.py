"""The language: reads solver files as a recipe.Schedule, with every mistake at once; its canonical form and digest. No torch, no numpy.

`lexer` and `parse` make a tree, `stages` lists the stages, `resolve` merges the files and runs the checks (`rules`), `build` and
`identity` make the recipe, `disk` reads a folder. A field is a line in protos/stagerun.proto, with its range, and an attribute in base/recipe.py.
"""

from stagerun.language.code import Unreadable
from stagerun.language.disk import files_in, load
from stagerun.language.labels import look_at_classes, look_at_folders, require_folders
from stagerun.language.resolve import SCHEDULE_FILE, read, stage_nodes
from stagerun.language.values import canonical, digest

__all__ = [
    "SCHEDULE_FILE",
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
