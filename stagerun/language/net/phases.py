"""Which layers of a net are in a phase: Caffe's include and exclude."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stagerun.language.tree import Block
from stagerun.language.view import View

TRAIN, TEST = "TRAIN", "TEST"
PHASES = (TRAIN, TEST)


@dataclass(frozen=True, slots=True)
class State:
    """Caffe's NetState without its phase: a solver's `train_state` or `test_state`."""

    level: int = 0
    stages: frozenset[str] = field(default_factory=frozenset)


def state_of(block: Block | None) -> State:
    """What a `train_state` or `test_state` says; None says nothing."""
    if block is None:
        return State()
    view = View(block)
    return State(view.whole("level") or 0, frozenset(view.texts("stage")))


def layers_in(layers: Iterable[Block], phase: str, state: State) -> list[Block]:
    """Those that one `include` rule lets in, or, where there is none, no `exclude` rule keeps out."""
    return [layer for layer in layers if _kept(layer, phase, state)]


def _kept(layer: Block, phase: str, state: State) -> bool:
    include, exclude = list(layer.blocks("include")), list(layer.blocks("exclude"))
    if include:
        return any(_meets(View(rule), phase, state) for rule in include)
    return not any(_meets(View(rule), phase, state) for rule in exclude)


def _meets(rule: View, phase: str, state: State) -> bool:
    if rule.has("phase") and rule.text("phase") != phase:
        return False
    low, high = rule.whole("min_level"), rule.whole("max_level")
    if (low is not None and state.level < low) or (high is not None and state.level > high):
        return False
    return set(rule.texts("stage")) <= state.stages and not set(rule.texts("not_stage")) & state.stages
