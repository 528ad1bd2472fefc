"""Networks from outside: a file of the user's, an installed package, or timm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from stagerun.base.code import Code, Sources
from stagerun.base.errors import StagerunError, UsageError, nearest
from stagerun.base.recipe import Model
from stagerun.language import arguments
from stagerun.language.consent import require_consent
from stagerun.language.networks import TIMM, code_in
from stagerun.models.layers import keep_statistics
from stagerun.models.vision import torchvision_models
from stagerun.system.code import called, explained, function_of, parameters_of, refusal

Refuse = Callable[[str, str], UsageError]  # message and hint -> an error that names the function that made the network


def foreign_network(model: Model) -> nn.Module:
    """Return the network of the user's function, with BatchNorm whose statistics are moved from outside. `frozen_by_network`: the names of frozen
    parameters; `refuse`: makes errors about the network. UsageError for any error in the code, or without consent."""
    code, sources = code_in(model.name), model.sources or Sources()
    assert code is not None
    require_consent(model, model.name)
    function = None
    if model.name.startswith(TIMM):
        net = _timm(model)
    else:
        if not code.file or any("torchvision" in text or "timm" in text for _, text in sources.files):
            torchvision_models()  # a CPU build of torch only imports it at the second attempt
        function = function_of(code, sources)
        names, more = parameters_of(function)
        shape = {"num_classes": model.num_classes} if "num_classes" in names or more else {}
        shape |= {"channels": model.channels} if "channels" in names else {}
        net = called(code, sources, function, **shape | arguments.read(model.args))
    refuse = partial(refusal, code, sources, function)
    net = _checked(net, refuse)
    for layer in net.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            keep_statistics(layer, model.moving_average_fraction)
            layer.eps = layer.eps if model.eps is None else model.eps
    net.__dict__ |= {
        "frozen_by_network": frozenset(name for name, p in net.named_parameters() if not p.requires_grad),
        "refuse": refuse,
        "sources": sources,
        "forward": _placed(net.forward, code, sources),
    }
    return net


def _timm(model: Model) -> object:
    torchvision_models()
    try:
        import timm
    except ImportError as error:
        raise UsageError(f"`{model.name}`: timm can't be imported: {error}", "pip install 'stagerun[timm]'") from error
    name = model.name.removeprefix(TIMM)
    if not timm.is_model(name.partition(".")[0]):
        hint = nearest(name, timm.list_models()) or "`timm.list_models()` lists them"
        raise UsageError(f"timm {timm.__version__} has no network `{name}`", hint)
    channels = {"in_chans": model.channels} if model.channels != 3 else {}
    named: dict[str, Any] = {"num_classes": model.num_classes, **channels, **arguments.read(model.args)}
    try:
        return timm.create_model(name, pretrained=False, **named)
    except Exception as error:  # its networks raise anything for arguments that they don't take
        hint = f"{name} may not take the values of `args` and `channels`" if len(named) > 1 else ""
        raise UsageError(f"timm can't make `{name}`: {type(error).__name__}: {error}", hint) from error


# Faults of a tensor, in words, with hints.
_FAULTS: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (
        is_lazy,
        "has no shape yet, since a lazy layer waits for its first images",
        "give the layer its sizes: for example, nn.Linear instead of nn.LazyLinear",
    ),
    (lambda tensor: tensor.is_meta, "has no values: it was made on the device `meta`", "make it on the CPU"),
    (Tensor.is_complex, "is complex, and stagerun's networks are real", "keep two real tensors"),
)


def _checked(net: object, refuse: Refuse) -> nn.Module:
    if not isinstance(net, nn.Module):
        hint = "end it with `return` and the network itself, not its class"
        what = "nothing" if net is None else f"a {type(net).__name__}"
        raise refuse(f"the function returns {what}, not an nn.Module", hint)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        for wrong, what, hint in _FAULTS:
            if wrong(tensor):
                raise refuse(f"`{name}` {what}", hint)
    for name, tensor in net.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise refuse(f"`{name}` in its state is not a tensor, and a snapshot holds tensors", "keep it in a buffer")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            hint = "register such a buffer with `persistent=False`: it need not be saved"
            raise refuse(f"`{name}` has numbers that are not finite", hint)
    for name, module in net.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            hint = "use nn.BatchNorm2d: normalisation over all workers would depend on their number"
            raise refuse(f"`{name}` is a SyncBatchNorm", hint)
    parameters = list(net.parameters())
    if not any(p.requires_grad for p in parameters):
        what = "the network has no parameters"
        if parameters:
            what = "every parameter of the network has `requires_grad` False"
        raise refuse(f"{what}: nothing to train", "register layers as attributes, not in a list or a dict")
    return net


def _placed(forward: Callable[..., Any], code: Code, sources: Sources) -> Callable[..., Any]:
    """Return the forward pass, with exceptions of the user's code as a UsageError that names the line."""

    def guarded(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **named)
        try:
            return forward(*args, **named)
        except (KeyboardInterrupt, StagerunError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if compiler or "more than 1 value per channel" in str(error):  # the engine explains these
                raise
            raise explained(error, code, sources) from error

    return guarded
