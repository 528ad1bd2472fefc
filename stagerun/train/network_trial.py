"""A trial of a user's network before the first update: reports what would fail later, or differ after a resume.

Everything is tried on networks that are thrown away, so the trained one is untouched.
"""

import os
import random
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Model, Precision
from stagerun.base.text import listed, size
from stagerun.comm import gather_json
from stagerun.engine.codec import digest
from stagerun.engine.device import autocast, dtype_of, seed
from stagerun.engine.state import to_channels_last
from stagerun.engine.update import explained
from stagerun.language.networks import code_in, from_outside
from stagerun.models import build
from stagerun.models.layers import norms
from stagerun.system.code import line_in, patiently
from stagerun.system.host import available_memory
from stagerun.train.agreement import everyone

if TYPE_CHECKING:
    from stagerun.train.context import StageRun

_SEED, _IMAGES = 1, 2
_NAMED = 3  # of parameters in a message
# Weights, gradients and momentum; and the networks that are tried.
_COPIES = 5
_SAME = "a resumed run must draw the same: use torch's random numbers alone, and no clock, no counter of calls"

Digests = Mapping[str, str]  # of a network's tensors, by name


def look_at(run: "StageRun") -> tuple[str, ...]:
    """Return notes on the stage's network, if it is the user's; its teacher's is tried, too. Collective; UsageError."""
    teacher = run.worker.schedule.teacher_model(run.stage)
    notes = _look_at(run, run.stage.model, learns=True)
    if teacher is not None and teacher != run.stage.model:
        _look_at(run, teacher, learns=False)
    return notes


def _look_at(run: "StageRun", model: Model, *, learns: bool) -> tuple[str, ...]:
    if not from_outside(model):
        return ()
    worker, stage, solver = run.worker, run.stage, run.stage.solver
    count, code = min(_IMAGES, solver.device_batch_size), code_in(model.name)
    assert code is not None

    def tried() -> tuple[tuple[str, ...], Digests]:
        shape = (count, model.channels, *worker.images.loader(stage).batch(0, count).images.shape[1:3])
        sharers = worker.world.local_size if learns else 0
        try:
            with patiently(code, model.sources, worker.comm.rank):
                return _tried(model, shape, worker.device, solver.precision, solver.channels_last, sharers)
        except UsageError as error:
            if learns:
                raise
            where = stage.written("solver.loss.teacher")
            taught = f"stage `{stage.name}`" + (f", which {where} names" if where is not None else "")
            raise UsageError(f"{error.message}\n  for the teacher of {taught}", error.hint) from None

    def require_same() -> None:
        for rank, digests in enumerate(everybody):
            if names := _different(everybody[0], digests):
                text = f"`{model.name}` makes another network on rank {rank} than on rank 0: {names}"
                raise UsageError(text, "it must not look at the rank, the host, the clock or the environment")

    notes, digests = everyone(worker.comm, tried)
    everybody = gather_json(worker.comm, dict(digests))
    everyone(worker.comm, require_same)  # one report for all ranks
    return notes


@lru_cache(maxsize=8)
def _tried(
    model: Model, shape: tuple[int, ...], device: torch.device, precision: Precision, channels_last: bool, workers: int
) -> tuple[tuple[str, ...], Digests]:
    """Return notes, and digests of the fresh network's tensors. `workers`: on this host, which share its memory; 0 for a teacher, which
    need not learn."""
    folder = os.getcwd()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        net, drawn = _fresh(model), _drawn()
        digests = _digests(net)
        if names := _different(digests, _digests(_fresh(model))):
            raise refuse(net, f"the function makes another network the second time: {names}", _SAME)
        if drawn != _drawn():
            raise refuse(net, "the function draws from Python's `random` or from numpy", _SAME)
        if workers:
            _require_memory(net, workers)
        net.to(device, dtype_of(precision))
        images = torch.randn(shape, device=device, dtype=dtype_of(precision))
        if channels_last:
            to_channels_last(net)
            images = images.contiguous(memory_format=torch.channels_last)
        with explained(len(images)):
            unused = _pass(net, images, model.num_classes, precision, learns=workers > 0)
    if (now := os.getcwd()) != folder:
        os.chdir(folder)
        hint = "leave `os.chdir` out: paths are relative to the folder where stagerun was started"
        raise refuse(net, f"the code changes the working folder to {now}", hint)
    notes = []
    if frozen := net.__dict__["frozen_by_network"]:
        notes.append(f"`{model.name}` freezes {_names(sorted(frozen))} itself: they stay as they are")
    if unused:
        notes.append(f"the loss of `{model.name}` doesn't depend on {_names(unused)}: weight decay alone moves them")
    return tuple(notes), digests


def _fresh(model: Model) -> nn.Module:
    torch.manual_seed(_SEED)
    return build(model)


def _digests(net: nn.Module) -> Digests:
    return {name: f"{list(t.shape)} {digest(t)}" for name, t in net.state_dict().items()}


def _different(first: Digests, other: Digests) -> str:
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return _names(names) if names else ""


def _names(names: Iterable[str]) -> str:
    return listed([f"`{name}`" for name in names], _NAMED)


def _drawn() -> str:
    """Return the state of the random numbers outside torch."""
    return repr((random.getstate(), tuple(np.random.get_state())[1:]))


def _require_memory(net: nn.Module, workers: int) -> None:
    """Check main memory alone, in which a network is made."""
    held = sum(t.numel() * t.element_size() for t in [*net.parameters(), *net.buffers()])
    if (_COPIES - 1) * held * workers > (free := available_memory()):
        each = f" in each of {workers} workers" if workers > 1 else ""
        needs = f"of which training needs {_COPIES} times as much{each}, and {size(free)} are free here"
        hint = "make it smaller, or take a machine with more memory"
        raise refuse(net, f"the network has {size(held)}, {needs}", hint)


def _pass(net: nn.Module, images: Tensor, classes: int, precision: Precision, *, learns: bool) -> list[str]:
    """Run forward twice, backward, and forward in evaluation; without `learns` twice in evaluation. Return the parameters that no
    gradient reaches."""
    net.train(learns)
    before = {name: t.detach().clone() for name, t in _tensors(net).items()}
    original, answers = images.clone(), []
    for _ in range(2):
        drawn = _drawn()
        seed(_SEED, images.device)
        with torch.set_grad_enabled(learns), autocast(precision, images.device):
            answers.append(require_logits(net, net(images), len(images), classes))
        if not torch.equal(images, original):
            hint = "write `x = x - 1` in place of `x -= 1`, and a first ReLU without `inplace=True`"
            raise refuse(net, "a forward pass changes its input images", hint)
    now = _tensors(net)
    moved = [n for n, t in before.items() if n in now and t.shape == now[n].shape and not torch.equal(t, now[n])]
    if moved:
        raise refuse(
            net,
            f"a forward pass changes {_names(moved)}, and only BatchNorm's statistics may change outside the update",
            "it would depend on the number of workers: compute it in each pass, or make it a parameter",
        )
    if drawn != _drawn():
        raise refuse(net, "a forward pass draws from Python's `random` or from numpy", _SAME)
    if not torch.equal(*answers) and images.device.type == "cpu" and answers[0].isfinite().all():
        raise refuse(net, "the network answers differently the second time, with the same images and seed", _SAME)
    if not learns:
        return []
    _backward(net, answers[1], images, precision)
    net.eval()
    with torch.no_grad(), autocast(precision, images.device):
        require_logits(net, net(images), len(images), classes)
    return [name for name, p in net.named_parameters() if p.requires_grad and p.grad is None]


def _tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, without the batch statistics that BatchNorm keeps."""
    batches = {id(t) for layer in norms(net) for t in (layer.batch_mean, layer.batch_var)}
    return {name: t for name, t in [*net.named_parameters(), *net.named_buffers()] if id(t) not in batches}


def _backward(net: nn.Module, logits: Tensor, images: Tensor, precision: Precision) -> None:
    labels = torch.arange(len(images), device=images.device) % logits.shape[1]
    if not logits.requires_grad:
        hint = "leave `detach`, `no_grad`, `.data` and numpy out of the forward pass"
        raise refuse(net, "the loss doesn't reach any parameter", hint)
    try:
        F.cross_entropy(logits.float(), labels).backward()
    except RuntimeError as error:
        # Once more, to name the user's line whose gradient fails.
        with warnings.catch_warnings(record=True) as caught, suppress(RuntimeError):
            warnings.simplefilter("always")
            with torch.autograd.set_detect_anomaly(True, check_nan=False), autocast(precision, images.device):
                F.cross_entropy(net(images).float(), labels).backward()
        line = line_in("".join(str(w.message) for w in caught), net.__dict__["sources"])
        reason = str(error).splitlines()[0].split("; ")[0]
        hint = "write `x = x + 1` in place of `x += 1`, and ReLU without `inplace=True`" if "inplace" in reason else ""
        where = f" at {line}" if line else ""
        raise refuse(net, f"the backward pass fails{where}: {reason}", hint) from error


def refuse(net: nn.Module, message: str, hint: str) -> UsageError:
    """Return an error with the place of the user's function."""
    made: UsageError = net.__dict__["refuse"](message, hint)
    return made


def require_logits(net: nn.Module, answer: object, images: int, classes: int) -> Tensor:
    """Return a network's answer, if it is [images, classes]; else raise UsageError."""
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
