"""What the trunk asks of a net of Caffe's. The wing `caffe` knows the answers."""

from dataclasses import dataclass
from typing import Any

from stagerun.base.recipe import Model, Stage
from stagerun.base.wings import require_wing


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """The label whose images count for nothing, which may be no class: in training, in the loss of an evaluation, in its top-1 and top-5. None:
    all count. `of_all`: the loss of an evaluation is divided by the number of all images. `by_some`: the labels that a loss or an
    Accuracy ignores, which may count elsewhere."""

    train: int | None = None
    loss: int | None = None
    accuracy: int | None = None
    of_all: bool = False
    by_some: frozenset[int] = frozenset()

    @property
    def test(self) -> int | None:
        """The label whose images count for nothing in a whole evaluation."""
        return self.loss if self.loss == self.accuracy else None


ALL_COUNT = Ignored()


def of_model(model: Model) -> Any:
    """The net (`caffe.net.Net`) that a network is. ValueError if it can't be one: a snapshot need not be ours."""
    return require_wing("caffe.resolve.of_model")(model)


def ignored_in(stage: Stage) -> Ignored:
    """The labels that count for nothing in a stage."""
    net = stage.model.net
    if net is None or "ignore_label" not in net:  # to read a large net takes a while
        return ALL_COUNT
    found: Ignored = require_wing("caffe.layers.ignored")(of_model(stage.model), stage.solver.loss is not None)
    return found
