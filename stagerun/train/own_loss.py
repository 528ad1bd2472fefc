"""A loss that the user has written in Python."""

import torch
from torch import nn

from stagerun.base.code import code_of
from stagerun.base.errors import UsageError
from stagerun.base.recipe import Loss
from stagerun.engine.losses import Own, try_out
from stagerun.language import arguments
from stagerun.language.consent import require_consent
from stagerun.system.code import called, function_of, parameters_of


def own_loss(how: Loss, smoothing: float, classes: int, device: torch.device, dtype: torch.dtype) -> Own:
    """Build the loss by the user's function, and try it on four made-up images. UsageError with the place in the user's file."""
    require_consent(how, "the loss of a snapshot")
    assert how.function is not None and how.sources is not None
    code, sources = code_of(how.function), how.sources
    builder, named = function_of(code, sources), arguments.read(how.args)
    names, others = parameters_of(builder)
    if others or "num_classes" in names:
        named["num_classes"] = classes
    try:
        function = called(code, sources, builder, **named)
    except UsageError as error:
        if "required positional argument" in error.message:
            error.hint = (
                f"`{code.function}` is called once, with `args` alone; it returns the function of (logits, targets)"
            )
        raise
    if not callable(function):
        hint = f"let `{code.function}` return a function of (logits, targets), or an nn.Module without parameters"
        raise UsageError(f"`{code}` returns {function!r:.40}, which can't be called", hint)
    if isinstance(function, nn.Module):
        if any(True for _ in function.parameters()):
            raise UsageError(f"the loss of `{code}` has parameters, which no one would train", "make them buffers")
        function.to(device, dtype)
    own = Own(smoothing, code, sources, function)
    try_out(own, classes, device, dtype)
    return own
