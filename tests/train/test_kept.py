"""What is logged of compressed gradients, against the gradients themselves: norms, what was lost, bytes; and that looking moves no bit."""

from dataclasses import dataclass

import pytest
import torch
from compressing import make
from facade import CompressedItem, Kept, Memory, Method
from torch import nn

from stagerun.comm import SoloComm
from stagerun.wire.reducer import CompressedReducer, Cut, Residual

SHAPES = {"conv.weight": (16, 3, 3, 3), "conv.bias": (16,), "fc.weight": (10, 200), "fc.bias": (10,)}
METHODS = [m for m in Method if m is not Method.AUTO]


@dataclass
class Done:
    """An iteration: gradients, the sum, which with one sender is what its messages say, and what was seen of it."""

    gradients: dict[str, torch.Tensor]
    sums: dict[str, torch.Tensor]
    items: tuple[CompressedItem, ...]


def iterations(method: Method, memory: Memory, every: int, whole: bool = False, count: int = 3) -> list[Done]:
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    total = sum(p.numel() for p in parameters.values())
    shapes = [(total,)] * len(parameters) if whole else [p.shape for p in parameters.values()]
    operators = [make(method, shape, memory=memory) for shape in shapes]
    runs, kept = [range(1)], Kept(every)
    reducer = CompressedReducer(
        parameters, operators, SoloComm(), runs, Cut(seed=1, whole=len(parameters) * whole),
        residual=Residual(parameters, runs, 0, {}) if memory is Memory.RESIDUAL else None, kept=kept,
    )  # fmt: skip
    found, draw = [], torch.Generator().manual_seed(1)
    for i in range(count):
        gradients = {name: torch.randn(p.shape, generator=draw) * 0.01 for name, p in parameters.items()}
        loss = torch.stack([(p * gradients[name]).sum() for name, p in parameters.items()]).sum()
        reducer.begin(i)
        reducer.add(loss, 0, torch.ones(2, dtype=torch.float64), last=True)
        reducer.finish()
        reducer.accept()
        sums = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        found.append(Done(gradients, sums, kept.take()))
    return found


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("whole", [False, True], ids=["layer-wise", "entire model"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_norms_are_those_of_what_was_sent_and_of_what_was_not(method, whole, memory):
    residual = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for done in iterations(method, memory, every=1, whole=whole):
        c = {name: done.gradients[name].double() + residual[name] for name in SHAPES}
        left = {name: c[name] - done.sums[name].double() for name in SHAPES}
        if memory is Memory.RESIDUAL:
            residual = left
        groups = {"entire model": list(SHAPES)} if whole else {name: [name] for name in SHAPES}
        assert [item.name for item in done.items] == list(groups), "in model order"
        for item in done.items:
            norm, lost = (
                float(torch.cat([part[name].flatten() for name in groups[item.name]]).norm()) for part in (c, left)
            )
            assert item.norm == pytest.approx(norm, rel=1e-5)
            if item.residual_norm is None:
                assert (method, memory, item.kept) == (Method.POWER_SGD, Memory.NONE, None)
                continue
            assert item.residual_norm == pytest.approx(lost, rel=1e-4, abs=2e-7 * norm)
            assert item.kept == pytest.approx(1 - (lost / norm) ** 2, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.value)
def test_to_look_changes_no_bit(method, memory):
    seen, unseen = iterations(method, memory, every=2, count=4), iterations(method, memory, every=0, count=4)
    assert [bool(done.items) for done in seen] == [False, True, False, True], "the second and the fourth are due"
    assert not any(done.items for done in unseen)
    for one, other in zip(seen, unseen, strict=True):
        assert all(torch.equal(one.sums[name], other.sums[name]) for name in SHAPES)
