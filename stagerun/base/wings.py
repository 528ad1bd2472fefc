"""Wings: features that most runs don't use, each whole in a folder. The trunk has only their names in its tables, and looks them up here;
without the folder everything else works."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Model, Stage


@cache
def wing(name: str) -> Any:
    """Return `FOLDER.MODULE.NAME` of the package; None if the folder is missing."""
    module, _, member = f"stagerun.{name}".rpartition(".")
    folders = module.split(".")
    if any(find_spec(".".join(folders[:n])) is None for n in range(2, len(folders) + 1)):
        return None
    return getattr(import_module(module), member)


def require_wing(name: str) -> Any:
    """Return `FOLDER.MODULE.NAME` of the package. UsageError if the folder is missing."""
    member = wing(name)
    if member is None:
        raise UsageError(f"this installation lacks stagerun/{name.partition('.')[0]}", "install all of stagerun")
    return member


# -- questions of the trunk about a Caffe net, which the wing `caffe` answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """The label whose images are ignored, which need not be a class: in training, in the loss of an evaluation, in its top-1 and top-5. None:
    all count. `of_all`: the loss of an evaluation is divided by the number of all images."""

    train: int | None = None
    loss: int | None = None
    accuracy: int | None = None
    of_all: bool = False

    @property
    def test(self) -> int | None:
        """Return the label that a whole evaluation ignores."""
        return self.loss if self.loss == self.accuracy else None


ALL_COUNT = Ignored()


def of_model(model: Model) -> Any:
    """Return the net (`caffe.reading.Net`) of a network. ValueError if it is invalid: a snapshot may come from anyone."""
    return require_wing("caffe.resolve.of_model")(model)


def ignored_in(stage: Stage) -> Ignored:
    """Return the labels that a stage ignores."""
    net = stage.model.net
    if net is None or "ignore_label" not in net:  # reading a large net takes a while
        return ALL_COUNT
    ignored: Ignored = require_wing("caffe.layers.ignored")(of_model(stage.model), stage.solver.loss is not None)
    return ignored
