"""The schedule that a file belongs to, with what the editor holds of its files: what `check` and lint say of it, and what its stages are."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor

from stagerun.base.errors import Level, Problem, RecipeError, Span, StagerunError
from stagerun.base.recipe import Schedule
from stagerun.language import files_in, load, look_at_classes, look_at_folders, stage_nodes
from stagerun.language.resolve import SCHEDULE_FILE
from stagerun.language.stages import Node
from stagerun.language.tree import SCHEDULE, SOLVER
from stagerun.system.files import upward
from stagerun.tools.lint import lint

Texts = Mapping[str, str]  # by absolute path


def folder_of(path: str, typed: Texts) -> str | None:
    """The nearest folder at or above a file that has a schedule.prototxt, on disk or in the editor."""
    for folder in upward(path):
        first = os.path.join(folder, SCHEDULE_FILE)
        if first in typed or os.path.isfile(first):
            return folder
    return None


@dataclass(frozen=True, slots=True)
class Folder:
    """`schedule`: None where there are mistakes. `findings`: lint's; what `run` won't take of images that are here is among them."""

    path: str
    typed: Texts
    schedule: Schedule | None = None
    mistakes: tuple[Problem, ...] = ()
    findings: tuple[Problem, ...] = ()
    kinds: Mapping[str, Descriptor] = field(default_factory=dict)

    @property
    def problems(self) -> tuple[Problem, ...]:
        return (*self.mistakes, *self.findings)

    def kind(self, path: str) -> Descriptor | None:
        """Schedule or Solver; None for a file that the schedule doesn't name as a stage's."""
        return self.kinds.get(self.name(path))

    def name(self, path: str) -> str:
        """A file as the schedule names it."""
        return os.path.relpath(path, self.path)

    def nodes(self) -> list[Node]:
        """The stages, as far as schedule.prototxt can be read."""
        return stage_nodes(files_in(self.path, edited_in(self.path, self.typed))[SCHEDULE_FILE])

    def listed(self) -> list[str]:
        """The files in the folder itself: those below it may be a hundred thousand pictures."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(one.name for one in entries if one.is_file())
        except OSError:
            return []


def look(path: str, typed: Texts) -> Folder:
    """What `stagerun check` says of a folder whose files are as the editor holds them."""
    edited = edited_in(path, typed)
    kinds = {SCHEDULE_FILE: SCHEDULE}
    try:
        kinds = dict.fromkeys(files_in(path, edited), SOLVER) | kinds
        schedule = load(path, (), edited)
        found = lint(schedule)
        if all(one.level is Level.NOTE for one in found):
            found = (*found, *look_at_folders(schedule), *look_at_classes(schedule))
    except RecipeError as error:
        return Folder(path, typed, mistakes=error.problems, kinds=kinds)
    except StagerunError as error:
        first = Span(os.path.join(path, SCHEDULE_FILE), 1, 1)
        return Folder(path, typed, mistakes=(Problem(error.message, first, "", error.hint),), kinds=kinds)
    return Folder(path, typed, schedule, (), found, kinds)


def edited_in(path: str, typed: Texts) -> dict[str, bytes]:
    return {os.path.relpath(one, path): text.encode(errors="surrogatepass") for one, text in typed.items()}
