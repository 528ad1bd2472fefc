"""The language: solver files -> recipe.Schedule, with every mistake at once; its manual; its digest."""

from stagerun.spec.resolve import Unreadable, load, look_at_classes, read, stage_files
from stagerun.spec.values import canonical, digest

__all__ = ["Unreadable", "canonical", "digest", "load", "look_at_classes", "read", "stage_files"]
