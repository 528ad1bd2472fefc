"""The language: solver files -> recipe.Schedule, with every mistake at once; its manual; its digest."""

from stagerun.spec.digest import canonical, digest
from stagerun.spec.load import load
from stagerun.spec.manual import help_text
from stagerun.spec.resolve import Unreadable, read, stage_files

__all__ = ["Unreadable", "canonical", "digest", "help_text", "load", "read", "stage_files"]
