"""Compressed gradients in training: who sends what, whose bits are the same, and what is remembered when."""

from dataclasses import replace
from pathlib import Path

import contract
import numpy as np
import pytest
import torch
from compressing import how
from engine_help import KNOBS, SOLVER, Batch, ConvNet, Threads, assert_same, dataset, started, tensors, updates
from facade import Compression, Determinism, Memory, Method, Note, Scope, TrainState, decode, recipe
from nan_help import lives, make_schedule
from processes import ends

from stagerun.comm import Comm, SoloComm

FIXED, ELASTIC = Determinism.FIXED, Determinism.ELASTIC
# One that is sparse, one that is drawn, one with several rounds, one that is a sum.
FEW = (Method.TOP_K, Method.QSGD, Method.POWER_SGD, Method.BF16)
METHODS = [m for m in Method if m not in (Method.NONE, Method.AUTO)]
BATCHES = [dataset(8, seed=i) for i in range(4)]


def train(
    compress: Compression | None, determinism: Determinism, comm: Comm, batches: list[Batch] = BATCHES
) -> TrainState:
    return updates(ConvNet(), replace(SOLVER, compress=compress), batches, comm, determinism)[0]


def everything(state: TrainState, comm: Comm) -> dict[str, torch.Tensor]:
    """Weights, momentum, and, on rank 0, all residuals: what a snapshot has."""
    files = state.exchange.gather(keep=comm.rank == 0)
    residuals = [pair for file in files.values() for pair in decode(bytes(file)).items()]
    return tensors(state) | {f"residual {name}": t for name, t in residuals}


def job(workers: int, compress: Compression | None, determinism: Determinism) -> list[dict[str, torch.Tensor]]:
    return Threads(workers).run(lambda comm: everything(train(compress, determinism, comm), comm))


def without_residuals(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in found.items() if not name.startswith("residual")}


@pytest.mark.parametrize("scope", [Scope.LAYERWISE, pytest.param(Scope.ENTIRE_MODEL, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", [m if m in FEW else pytest.param(m, marks=pytest.mark.long) for m in METHODS])
def test_elastic_gives_any_number_of_workers_the_same_bits(method, scope):
    compress = how(method, scope=scope)
    (alone,) = job(1, compress, ELASTIC)
    for workers in (2, 3, 4):
        first, *others = job(workers, compress, ELASTIC)
        assert_same(alone, first)
        for other in others:
            assert_same(without_residuals(alone), other)


@pytest.mark.parametrize("method", METHODS)
def test_fixed_gives_all_ranks_the_same_bits(method):
    first, second, third = job(3, how(method), FIXED)
    assert_same(second, third)
    assert_same(without_residuals(first), second)


@pytest.mark.parametrize("determinism", Determinism)
def test_none_for_every_parameter_is_the_plain_sum(determinism):
    """In the order of the senders, which of two workers is that of every sum."""
    compress = how(Method.THRESHOLD, Memory.NONE, param=(recipe.CompressionRule(method=Method.NONE),))
    assert_same(job(2, None, determinism)[0], job(2, compress, determinism)[0], 1e-12)


def test_what_is_sent_and_what_is_left_make_up_the_gradients():
    """Without momentum and decay the weights have moved by what was sent: with what is left it is what dense training had sent at the
    same weights."""
    comm = SoloComm()
    dense = replace(SOLVER, momentum=0.0, weight_decay=0.0)
    solver = replace(dense, compress=how(Method.TOP_K))
    knobs = replace(KNOBS, lr=0.5, momentum=0.0, weight_decay=0.0)
    states = [(one, started(ConvNet(), one, comm)) for one in (dense, solver)]
    total, sent = ({p.name: torch.zeros_like(p.tensor) for p in state.solver.parameters} for _, state in states)
    for batch in BATCHES:
        before = {name: t.clone() for name, t in states[1][1].model.state_dict().items()}
        for (one, state), moved in zip(states, (total, sent), strict=True):
            state.model.load_state_dict(before)
            updates(ConvNet(), one, [batch], comm, knobs=lambda i: knobs, state=state)
            for p in state.solver.parameters:
                moved[p.name] += (before[p.name] - p.tensor.detach()) / 0.5
    residual = states[1][1].exchange.residual
    left = residual.by_name(residual.vectors[0])
    for name, whole in total.items():
        torch.testing.assert_close(sent[name] + left[name], whole, atol=1e-12, rtol=1e-9)
    assert any(left[name].abs().sum() > 0 for name in left)


@pytest.mark.parametrize("workers, why", [(1, "not finite"), (2, "broken off")])
def test_an_update_that_is_not_made_leaves_residuals_as_they_were(workers, why):
    compress = how(Method.POWER_SGD if workers == 1 else Method.TOP_K)

    def work(comm: Comm) -> None:
        state = train(compress, ELASTIC, comm)
        before, weight = everything(state, comm), state.model.fc.weight.detach()
        kept = weight.clone()
        if why == "not finite":
            weight[0, 0] = torch.nan
        late = None if why == "not finite" else lambda done: comm.rank == 1 and done == 1
        solver = replace(SOLVER, compress=compress)
        _, (outcome,) = updates(ConvNet(), solver, BATCHES[:1], comm, ELASTIC, state=state, broken_off=late)
        assert bool(outcome.wrong) == (why == "not finite") and outcome.broken_off == (why == "broken off")
        weight.copy_(kept)
        assert_same(before, everything(state, comm))

    Threads(workers).run(work)


def test_dense_until_it_starts():
    def work(comm: Comm, compress: Compression | None) -> list[dict[str, torch.Tensor]]:
        solver = replace(SOLVER, compress=compress)
        state = started(ConvNet(), solver, comm)
        # A reducer of its own for each process life: what it does depends on the iteration, not on what it has done.
        return [tensors(updates(ConvNet(), solver, [batch], comm, state=state)[0]) for batch in BATCHES[:3]]

    plain = Threads(2).run(lambda comm: work(comm, None))[0]
    for found in Threads(2).run(lambda comm: work(comm, how(Method.TERNGRAD, start_iter=2))):
        assert_same(found[0], plain[0])
        assert_same(found[1], plain[1])
        assert not torch.equal(found[2]["fc.weight"], plain[2]["fc.weight"])


def test_parameters_by_pattern():
    rules = (recipe.CompressionRule(name="fc*", method=Method.NONE),)
    for scope in Scope:
        state = train(how(Method.TOP_K, scope=scope, param=rules), FIXED, SoloComm())
        residual = state.exchange.residual
        left = residual.by_name(residual.vectors[0])
        assert not left["fc.weight"].any() and not left["fc.bias"].any()
        assert left["conv2.weight"].any()


@pytest.mark.parametrize("workers", [2, 4])
def test_a_threshold_means_the_same_for_any_number_of_workers(workers):
    """All workers have the same gradient: each sends what is above the threshold of the mean, and so does one alone."""
    compress, two = how(Method.THRESHOLD, threshold=0.02), dataset(2, seed=1)
    same = Batch(*(np.concatenate([a] * 4) for a in (two.images, two.labels, two.positions)))
    alone = tensors(train(compress, FIXED, SoloComm(), [same]))
    for found in Threads(workers).run(lambda comm: tensors(train(compress, FIXED, comm, [same]))):
        assert_same(found, alone, 1e-9)


# -- over lives


POWER_SGD = "method: POWER_SGD rank: 2"
QSGD = 'method: QSGD memory: RESIDUAL start_iter: 2 param { name: "fc*" method: NONE }'


def schedule(folder: Path, data: Path, compress: str, determinism: str) -> Path:
    solver = f"snapshot: 2 compress_param {{ {compress} }}"
    return make_schedule(folder, data, solver, shared=f"determinism: {determinism}", main="max_iter: 6")


@pytest.mark.long
@pytest.mark.parametrize(
    ("compress", "determinism", "then"), [(POWER_SGD, "FIXED", 2), (QSGD, "ELASTIC", 1), (POWER_SGD, "ELASTIC", 1)]
)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(few, tmp_path, compress, determinism, then):
    folder = schedule(tmp_path / "s", few, compress, determinism)
    lives(folder, tmp_path / "whole", then)
    lives(folder, tmp_path / "out", 2, stop_after=3)
    lives(folder, tmp_path / "out", then, kill_after=2)
    lives(folder, tmp_path / "out", then)
    assert ends(tmp_path / "out") == ends(tmp_path / "whole")


@pytest.mark.long
def test_fixed_goes_on_with_other_workers_and_says_what_becomes_of_residuals(few, tmp_path):
    folder = schedule(tmp_path / "s", few, POWER_SGD, "FIXED")
    lives(folder, tmp_path / "out", 2, stop_after=3)
    said = "\n".join(event.text for event in lives(folder, tmp_path / "out", 3) if isinstance(event, Note))
    assert "resume is EQUIVALENT, not BIT-EXACT" in said and "workers: 2 -> 3" in said
    assert "the residuals of 2 senders are shared out evenly over 3" in said


@pytest.mark.parametrize(
    ("field", "rule", "said"),
    [
        ("compress_param", 'method: TOP_K ratio: 0.1 param { name: "head*" method: NONE }', "with name `head*` and kind ANY"),
        ("param", "name: 'conv1.wieght' lr_mult: 0", "did you mean `conv1.weight`?"),
    ],
)  # fmt: skip
def test_a_pattern_that_fits_nothing_is_a_mistake_with_a_place(few, tmp_path, field, rule, said):
    folder = make_schedule(tmp_path / "s", few)
    done = contract.stagerun(["run", folder, "--nproc", 1, "--set", f"solver.{field}={{{rule}}}"], tmp_path)
    assert done.exit_code == 64 and said in done.output
    assert "fits no parameter of the model" in done.output and "--set" in done.output
