"""Networks from outside: a file of the user's, an installed package, or timm."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from stagerun.base import recipe
from stagerun.base.code import Code, Sources
from stagerun.base.errors import StagerunError, UsageError, nearest
from stagerun.language import arguments
from stagerun.language.consent import require_consent
from stagerun.language.networks import TIMM, code_in
from stagerun.models.layers import keep_statistics
from stagerun.models.vision import torchvision_models
from stagerun.system.code import called, explained, function_of, parameters_of, refusal

Refuse = Callable[[str, str], UsageError]  # a message and a hint, with the place of the function that made the network


def foreign_network(model: recipe.Model) -> nn.Module:
    """What the user's function returns, with BatchNorm whose statistics are moved from outside. `frozen_by_network` has the names of the
    parameters that it wants left alone, `refuse` makes an error of what is found wrong with it later. UsageError for whatever goes wrong
    in the code, and where it may not be run.
    """
    code = code_in(model.name)
    assert code is not None
    require_consent(model, model.name)
    function, net = _timm(model) if model.name.startswith(TIMM) else _own(code, model)
    sources = model.sources or Sources()

    def refuse(message: str, hint: str) -> UsageError:
        return refusal(code, sources, function, message, hint)

    _require_network(code, net, refuse)
    assert isinstance(net, nn.Module)
    for layer in net.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            keep_statistics(layer, model.moving_average_fraction)
            layer.eps = layer.eps if model.eps is None else model.eps
    frozen = frozenset(name for name, p in net.named_parameters() if not p.requires_grad)
    net.__dict__ |= {
        "frozen_by_network": frozen,
        "refuse": refuse,
        "sources": sources,
        "forward": _placed(net.forward, code, sources),
    }
    return net


def _own(code: Code, model: recipe.Model) -> tuple[Callable[..., Any], Any]:
    sources = model.sources
    assert sources is not None
    if not code.file or any("torchvision" in text or "timm" in text for _, text in sources.files):
        torchvision_models()  # which a CPU build of torch imports at the second attempt only
    function = function_of(code, sources)
    return function, called(code, sources, function, **arguments_for(function, model))


def arguments_for(function: Callable[..., Any], model: recipe.Model) -> dict[str, Any]:
    """What a function of the user's is called with."""
    names, more = parameters_of(function)
    shape = {"num_classes": model.num_classes} if "num_classes" in names or more else {}
    shape |= {"channels": model.channels} if "channels" in names else {}
    return {**shape, **arguments.read(model.args)}


def _timm(model: recipe.Model) -> tuple[Callable[..., Any] | None, Any]:
    torchvision_models()
    try:
        import timm
    except ImportError as error:
        raise UsageError(f"`{model.name}`: timm can't be imported: {error}", "pip install 'stagerun[timm]'") from error
    name = model.name.removeprefix(TIMM)
    if not timm.is_model(name.partition(".")[0]):
        hint = nearest(name, timm.list_models()) or "`timm.list_models()` lists them"
        raise UsageError(f"timm {timm.__version__} has no network `{name}`", hint)
    given = timms_arguments(model)
    try:
        return None, timm.create_model(name, pretrained=False, **given)
    except Exception as error:  # whatever its networks raise for arguments that they don't take
        hint = f"{name} may not take what `args` and `channels` say" if len(given) > 1 else ""
        raise UsageError(f"timm can't make `{name}`: {type(error).__name__}: {error}", hint) from error


def timms_arguments(model: recipe.Model) -> dict[str, Any]:
    """What timm's `create_model` is called with."""
    shape = {"num_classes": model.num_classes} | ({"in_chans": model.channels} if model.channels != 3 else {})
    return {**shape, **arguments.read(model.args)}


def _require_network(code: Code, net: object, refuse: Refuse) -> None:
    if not isinstance(net, nn.Module):
        if net is None:
            raise refuse("the function returns nothing", "end it with `return` and the network")
        what = f"the class `{net.__name__}`" if isinstance(net, type) else f"a {type(net).__name__}"
        hint = f"write `return {net.__name__}(...)`" if isinstance(net, type) else "return the network itself"
        raise refuse(f"the function returns {what}, not an nn.Module", hint)
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        if is_lazy(tensor):
            hint = "give the layer its sizes: nn.Linear in place of nn.LazyLinear, say"
            raise refuse(f"`{name}` has no shape yet, since a lazy layer waits for its first images", hint)
        if tensor.is_meta:
            raise refuse(f"`{name}` has no values: it was made on the device `meta`", "make it on the CPU")
        if tensor.is_complex():
            raise refuse(f"`{name}` is complex, and the numbers of a network are real here", "keep two real tensors")
    for name, tensor in net.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise refuse(f"`{name}` of its state is no tensor, and a snapshot holds tensors", "keep it in a buffer")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            hint = "register such a buffer with `persistent=False`: it need not be saved"
            raise refuse(f"`{name}` has numbers that are not finite", hint)
    for name, module in net.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            hint = "take nn.BatchNorm2d: normalisation over all workers would hang on their number"
            raise refuse(f"`{name}` is a SyncBatchNorm", hint)
    if not any(p.requires_grad for p in net.parameters()):
        some = any(True for _ in net.parameters())
        what = "every parameter of the network has `requires_grad` False" if some else "the network has no parameters"
        raise refuse(f"{what}: there is nothing to train", "register layers as attributes, not in a list or a dict")


def _placed(forward: Callable[..., Any], code: Code, sources: Sources) -> Callable[..., Any]:
    """The forward pass, with what the user's code raises in it as a UsageError with its place."""

    def guarded(*args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(*args, **named)
        try:
            return forward(*args, **named)
        except (KeyboardInterrupt, StagerunError, torch.OutOfMemoryError):
            raise
        except BaseException as error:
            compiler = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
            if compiler or "more than 1 value per channel" in str(error):  # the engine has words for these
                raise
            raise explained(error, code, sources) from error

    return guarded


def refuse(net: nn.Module, message: str, hint: str) -> UsageError:
    """An error with the place of the function that made a network from outside."""
    made: UsageError = net.__dict__["refuse"](message, hint)
    return made


def require_logits(net: nn.Module, answer: object, images: int, classes: int) -> Tensor:
    """What a network answered, if that is [images, classes]; else a UsageError."""
    wanted = f"logits [N, num_classes], here [{images}, {classes}]"
    if not isinstance(answer, Tensor):
        what = "nothing" if answer is None else f"a {type(answer).__name__}"
        hint = "return them from `forward`" if answer is None else "return the logits alone from `forward`"
        raise refuse(net, f"the network answers with {what}, not with {wanted}", hint)
    shape = list(answer.shape)
    if shape != [images, classes]:
        hint = f"the last layer has {classes} outputs where the function uses its argument `num_classes`"
        if len(shape) > 2:
            hint = "end with a mean over the map and `flatten(1)`, then a linear layer"
        raise refuse(net, f"the network answers with {shape}, not with {wanted}", hint)
    if not answer.is_floating_point():
        raise refuse(
            net, f"the network answers with {answer.dtype}, not with numbers in floating point", "return logits"
        )
    return answer
