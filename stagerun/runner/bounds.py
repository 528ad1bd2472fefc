"""How large the files of a snapshot may be: not larger than its network makes them. So a file of 100 GB, which costs its maker
nothing where the file system keeps holes, is refused by its size, and a recipe of an endless network before that is built."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stagerun import recipe
from stagerun.errors import ResumeRefused
from stagerun.models import build
from stagerun.runner.progress import AVERAGE, MOMENTUM, MOST_RECIPE, MOST_STATE, RECIPE, STATE, WEIGHTS
from stagerun.system.host import available_memory
from stagerun.text import size

# Bytes of a number in a tensor: precision FP64, and less than any. What a solver remembers of a parameter: two tensors at most (Adam's).
NARROWEST, WIDEST, SLOTS = 2, 8, 2
# For names, and for what another version's network had more.
SLACK = 16_000_000


def most_bytes(model: recipe.Model) -> Mapping[str, int]:
    """By file, as `store.read` takes it."""
    numbers = elements(model)
    tensors = WIDEST * numbers + SLACK
    return {
        WEIGHTS: tensors,
        AVERAGE: tensors,
        MOMENTUM: SLOTS * WIDEST * numbers + SLACK,
        STATE: MOST_STATE,
        RECIPE: MOST_RECIPE,
    }


@lru_cache(maxsize=4)
def elements(model: recipe.Model) -> int:
    """Numbers in the parameters and buffers of a network, however large it is: it is made without memory for them. Torch's random
    state is left alone."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return _count(build(model))
        except NotImplementedError:  # torchvision's RegNets compute their widths with tensors, which must have memory
            with _LayersWithoutMemory():
                return _count(build(model))


class _LayersWithoutMemory(TorchFunctionMode):
    """Of what is made in here the tensors have no memory that layers are made of; those that are computed with have."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.empty, torch.zeros, torch.ones):
            return func(*args, **{**(kwargs or {}), "device": "meta"})
        return func(*args, **(kwargs or {}))


def _count(network: nn.Module) -> int:
    return sum(tensor.numel() for tensor in network.state_dict().values())


def require_buildable(name: str, model: recipe.Model) -> Mapping[str, int]:
    """`most_bytes` of the network that a snapshot's own recipe names. ResumeRefused for one that stagerun doesn't know, or that
    doesn't fit into the memory that is free: whoever wrote the recipe may have meant harm."""
    try:
        most = most_bytes(model)
    except (KeyError, ValueError, TypeError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise ResumeRefused(
            f"the recipe in snapshot {name} names a network that can't be made: {type(error).__name__}: {error}",
            "it was made by another version of stagerun, or by nobody's run",
        ) from error
    needed, free = most[WEIGHTS] - SLACK, available_memory()
    if needed > free:
        raise ResumeRefused(
            f"the network in snapshot {name} may need {size(needed)} of memory, and {size(free)} are free here",
            "take a machine with more memory, if that network is meant",
        )
    return most


def require_large_enough(name: str, model: recipe.Model, weights: bytes) -> None:
    """ResumeRefused if a file is too small to be the weights of a network, which then need not be built to see that they are not."""
    if len(weights) < NARROWEST * elements(model):
        raise ResumeRefused(
            f"snapshot {name} does not fit network `{model.name}`: its weights have {len(weights)} bytes, and the network has "
            f"{elements(model)} numbers",
            "no run has written that",
        )
