"""`import stagerun`: `plan` and `Snapshot`, which do what the commands do and print nothing. `running` has `run`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from stagerun import store
from stagerun.base.errors import ResumeRefused, UsageError
from stagerun.base.recipe import Schedule
from stagerun.base.wings import wing
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.language.stored import read_foreign
from stagerun.plan import planned
from stagerun.plan.render import render_text
from stagerun.tools.output import plan_of
from stagerun.train.keeper import Selection
from stagerun.train.progress import MOST_RECIPE, RECIPE

if TYPE_CHECKING:
    from torch import nn

Folder = str | os.PathLike[str]
Names = str | Sequence[str]


def names_of(names: Names) -> tuple[str, ...]:
    several = (names,) if isinstance(names, str) else names
    if isinstance(several, list | tuple) and all(isinstance(name, str) for name in several):
        return tuple(several)
    raise UsageError(f"{names!r} is neither a text nor several", 'write "NAME", or ["NAME", "NAME"]')


def selection_of(redo: Names, only: Names, until: str | None) -> Selection:
    if until is not None and not isinstance(until, str):
        raise UsageError(f"until={until!r}: one stage's name is wanted", "`only` takes several names")
    return Selection(names_of(redo), names_of(only), until)


def schedule_of(schedule: Schedule | Folder, overrides: Names) -> Schedule:
    if not isinstance(schedule, Schedule):
        return load(os.fspath(schedule), names_of(overrides))
    if overrides:
        raise UsageError("a schedule that is loaded takes no `overrides`", "give them to `stagerun.load`")
    return schedule


@dataclass(frozen=True, slots=True, repr=False)
class Plan(planned.Plan):
    """A plan of what `run` would do. As text it is what `stagerun plan` prints."""

    def __str__(self) -> str:
        return render_text(self)

    def __repr__(self) -> str:
        return f"<Plan of {self.schedule.name}: {self.left} to do>"

    def _repr_html_(self) -> str:
        """Show the text and the chart in a notebook."""
        text = f"<pre>{escape(str(self))}</pre>"
        if (make_picture := wing("look.picture.make_picture")) is None:
            return text
        svg: str = wing("look.chart.svg")(make_picture(self.schedule))
        return text + svg


def plan(
    schedule: Schedule | Folder,
    out: Folder | None = None,
    *,
    overrides: Names = (),
    redo: Names = (),
    only: Names = (),
    until: str | None = None,
) -> Plan:
    """Return what `run` would do with the same arguments. Works where the data is not, and loads neither torch nor numpy.

    `out`: the output folder, by default out/NAME. RecipeError for mistakes in the files, or an unknown stage.
    """
    selection, schedule = selection_of(redo, only, until), schedule_of(schedule, overrides)
    made = plan_of(schedule, output_folder(schedule.name, None if out is None else os.fspath(out)), selection)
    return Plan(**{field.name: getattr(made, field.name) for field in fields(made)})


class Snapshot:
    """A snapshot's folder, OUT/snapshots/NAME. Reads and verifies the recipe at once, and the tensors in `model`."""

    def __init__(self, path: Folder) -> None:
        """UsageError for what is not a snapshot; Damaged, ResumeRefused, StorageError, PermissionDenied."""
        from stagerun.tools.weights import choose_snapshot

        self.path: Path = choose_snapshot(os.fspath(path))
        # `ref`: everything but the tensors, as id, parent, identity, environment.
        self.ref, text = store.read_file(store.LocalDisk(), self.path, RECIPE, MOST_RECIPE)
        self.name, self.stage, self.iter = self.ref.name, self.ref.stage, self.ref.iter
        try:
            self.recipe: Schedule = read_foreign(text.decode())
            self.recipe.stage(self.stage)
        except (KeyError, ValueError) as error:
            version = self.ref.environment.get("stagerun", "another version")
            message = f"the recipe in snapshot {self.name} can't be read: {error}"
            raise ResumeRefused(message, f"it was written by stagerun {version}: use that one") from error

    def model(self, ema: bool = False, device: str = "cpu", trust_code: bool = False) -> "nn.Module":
        """Return a new copy of the network with its weights, in evaluation mode, in the precision that it was trained in.

        It takes images as `stagerun export` says, and returns logits. `ema`: the averaged weights, where the stage has `ema_decay`.
        `trust_code`: runs the Python that makes the network, as the snapshot has it; UsageError for such a network without.
        """
        import torch

        from stagerun.tools.weights.snapshot import load_network, open_snapshot

        with torch.random.fork_rng(devices=[]):  # weights are drawn before they are read
            return load_network(open_snapshot(self.path, trust_code), torch.device(device), ema)

    def __repr__(self) -> str:
        return f"<Snapshot {self.name} of {self.recipe.name}: stage {self.stage} after {self.iter} iterations>"
