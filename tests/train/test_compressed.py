"""Compressed gradients in training: who sends what, whose bits are the same, and what is remembered when."""

from dataclasses import replace

import pytest
import torch
from engine_help import CPU, KNOBS, SOLVER, ConvNet, Threads, arithmetic, assert_same, cut, dataset, tensors

from stagerun.base import compression
from stagerun.base.recipe import Compression, CompressionRule, Determinism, Memory, Method, Scope, Solver
from stagerun.comm import Comm, SoloComm, runs_of
from stagerun.engine.compression import reducer_of, residual_of
from stagerun.engine.state import Capture, TrainState, make_state
from stagerun.engine.update import update

FIXED, ELASTIC = Determinism.FIXED, Determinism.ELASTIC
LOGICAL = 4
# One that is sparse, one that is drawn, one with several rounds, one that is a sum.
FEW = (Method.TOP_K, Method.QSGD, Method.POWER_SGD, Method.BF16)
METHODS = [m for m in Method if m not in (Method.NONE, Method.AUTO)]


def how(method: Method, memory: Memory | None = None, **settings: object) -> Compression:
    found = compression.settings_of(method)
    found |= {"ratio": 0.1} if "ratio" in found else {}
    found |= {"threshold": 0.01} if found.get("threshold") else {}
    found |= {"rank": 2} if "rank" in found else {}
    memory = memory or compression.METHODS[method].memory
    return Compression(**{"method": method, "memory": memory, **found, **settings})


def solver_of(compress: Compression | None) -> Solver:
    return replace(SOLVER, batch_size=2 * LOGICAL, device_batch_size=2, compress=compress)


def started(compress: Compression | None, determinism: Determinism, comm: Comm) -> TrainState:
    solver = solver_of(compress)
    state = make_state(ConvNet(), solver, CPU)
    state.residual = residual_of(determinism, state, solver, comm)
    return state


def train(
    compress: Compression | None,
    determinism: Determinism,
    comm: Comm,
    iterations: range = range(4),
    state: TrainState | None = None,
) -> TrainState:
    solver = solver_of(compress)
    state = state or started(compress, determinism, comm)
    reducer = reducer_of(determinism, state, solver, comm)
    run = runs_of(LOGICAL, comm.size)[comm.rank]
    for i in iterations:
        whole = dataset(solver.batch_size, seed=i)
        pieces = ((k, cut(whole, 2 * k, 2 * k + 2), k == run[-1]) for k in run)
        update(state, pieces, KNOBS, reducer, arithmetic(solver), lambda: False)
    return state


def everything(state: TrainState, comm: Comm) -> dict[str, torch.Tensor]:
    """Weights, momentum, and, on rank 0, all residuals: what a snapshot has."""
    found = tensors(state)
    if state.residual is not None and comm.rank == 0:
        capture = Capture(state)
        capture.take_residual(state.residual, comm)
        assert capture.residual is not None
        found |= {f"residual {name}": t.clone() for name, t in capture.residual.tensors.items()}
    elif state.residual is not None:
        state.residual.gather(comm, None)
    return found


def job(workers: int, compress: Compression | None, determinism: Determinism) -> list[dict[str, torch.Tensor]]:
    def work(comm: Comm) -> dict[str, torch.Tensor]:
        return everything(train(compress, determinism, comm), comm)

    return Threads(workers).run(work) if workers > 1 else [work(SoloComm())]


@pytest.mark.parametrize("scope", [Scope.LAYERWISE, pytest.param(Scope.ENTIRE_MODEL, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", [m if m in FEW else pytest.param(m, marks=pytest.mark.long) for m in METHODS])
def test_elastic_gives_any_number_of_workers_the_same_bits(method: Method, scope: Scope) -> None:
    compress = how(method, scope=scope)
    (alone,) = job(1, compress, ELASTIC)
    for workers in (2, 3, 4):
        first, *others = job(workers, compress, ELASTIC)
        assert_same(alone, first)
        for other in others:
            assert_same({k: v for k, v in alone.items() if not k.startswith("residual")}, other)


@pytest.mark.parametrize("method", METHODS)
def test_fixed_gives_all_ranks_the_same_bits(method: Method) -> None:
    first, second, third = job(3, how(method), FIXED)
    assert_same(second, third)
    assert_same({k: v for k, v in first.items() if not k.startswith("residual")}, second)


@pytest.mark.parametrize("determinism", Determinism)
def test_none_for_every_parameter_is_the_plain_sum(determinism: Determinism) -> None:
    """In the order of the senders, which of two workers is that of every sum."""
    compress = how(Method.THRESHOLD, Memory.NONE, param=(CompressionRule(method=Method.NONE),))
    plain, ours = job(2, None, determinism), job(2, compress, determinism)
    assert_same(plain[0], ours[0], 1e-12)


def test_what_is_sent_and_what_is_left_make_up_the_gradients() -> None:
    """Without momentum and decay the weights have moved by what was sent: with what is left it is what dense training had sent at the
    same weights."""
    comm, compress = SoloComm(), how(Method.TOP_K)
    solver = replace(solver_of(compress), momentum=0.0, weight_decay=0.0)
    state, dense = started(compress, FIXED, comm), started(None, FIXED, comm)
    reducer = reducer_of(FIXED, state, solver, comm)
    plain = reducer_of(FIXED, dense, replace(solver, compress=None), comm)
    sent, total = ({p.name: torch.zeros_like(p.tensor) for p in state.solver.parameters} for _ in range(2))
    knobs = replace(KNOBS, lr=0.5, momentum=0.0, weight_decay=0.0)
    for i in range(3):
        for name, tensor in dense.model.state_dict().items():
            tensor.copy_(state.model.state_dict()[name])
        before = tensors(state)
        for one, how_to, moved in ((dense, plain, total), (state, reducer, sent)):
            whole = dataset(solver.batch_size, seed=i)
            pieces = ((k, cut(whole, 2 * k, 2 * k + 2), k == LOGICAL - 1) for k in range(LOGICAL))
            update(one, pieces, knobs, how_to, arithmetic(solver), lambda: False)
            for p in one.solver.parameters:
                moved[p.name] += (before[p.name] - p.tensor.detach()) / 0.5
    assert state.residual is not None
    left = state.residual.by_name(state.residual.vectors[0])
    for name, whole_sum in total.items():
        torch.testing.assert_close(sent[name] + left[name], whole_sum, atol=1e-12, rtol=1e-9)
    assert any(left[name].abs().sum() > 0 for name in left)


@pytest.mark.parametrize("method", [Method.TOP_K, Method.POWER_SGD, Method.QSGD])
@pytest.mark.parametrize("determinism", Determinism)
def test_a_run_that_goes_on_from_its_residuals_has_the_bits_of_one_that_never_stopped(
    method: Method, determinism: Determinism
) -> None:
    compress = how(method)

    def straight(comm: Comm) -> dict[str, torch.Tensor]:
        return everything(train(compress, determinism, comm), comm)

    def halved(comm: Comm) -> dict[str, torch.Tensor]:
        half = train(compress, determinism, comm, range(2))
        again = started(compress, determinism, comm)
        again.model.load_state_dict(half.model.state_dict())
        for slot, kept in half.solver.history.items():
            for name, tensor in kept.items():
                again.solver.history[slot][name].copy_(tensor)
        again.iter = half.iter
        saved: dict[int, dict[str, torch.Tensor]] = {}
        if half.residual is not None and again.residual is not None:
            half.residual.gather(comm, lambda s, parts: saved.update({s: {k: v.clone() for k, v in parts.items()}}))
            fill = lambda s, parts: [part.copy_(saved[s][name]) for name, part in parts.items()]  # noqa: E731
            again.residual.hand_out(comm, fill if comm.rank == 0 else None)
            again.residual.bases |= half.residual.bases  # that of every rank is the same
        return everything(train(compress, determinism, comm, range(2, 4), again), comm)

    for one, other in zip(Threads(2).run(straight), Threads(2).run(halved), strict=True):
        assert_same(one, other)


def test_an_update_that_is_not_made_leaves_residuals_as_they_were() -> None:
    comm, compress = SoloComm(), how(Method.POWER_SGD)
    state = train(compress, FIXED, comm)
    before = everything(state, comm)
    solver = solver_of(compress)
    reducer = reducer_of(FIXED, state, solver, comm)
    whole = dataset(solver.batch_size, seed=9)
    with torch.no_grad():
        weight = state.model.fc.weight[0, 0].clone()
        state.model.fc.weight[0, 0] = torch.nan
    pieces = ((k, cut(whole, 2 * k, 2 * k + 2), k == LOGICAL - 1) for k in range(LOGICAL))
    outcome = update(state, pieces, KNOBS, reducer, arithmetic(solver), lambda: False)
    assert outcome.wrong
    with torch.no_grad():
        state.model.fc.weight[0, 0] = weight
    assert_same(before, everything(state, comm))


def test_an_iteration_that_is_broken_off_leaves_residuals_as_they_were() -> None:
    compress = how(Method.TOP_K)

    def work(comm: Comm) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        state = train(compress, ELASTIC, comm)
        before, solver = everything(state, comm), solver_of(compress)
        reducer, run = reducer_of(ELASTIC, state, solver, comm), runs_of(LOGICAL, comm.size)[comm.rank]
        whole = dataset(solver.batch_size, seed=9)
        pieces = ((k, cut(whole, 2 * k, 2 * k + 2), k == run[-1]) for k in run)
        outcome = update(
            state, pieces, KNOBS, reducer, arithmetic(solver), lambda: False, lambda done: comm.rank == 1 and done == 1
        )
        assert outcome.broken_off
        return before, everything(state, comm)

    for before, after in Threads(2).run(work):
        assert_same(before, after)


def test_dense_until_it_starts() -> None:
    compress = how(Method.TERNGRAD, start_iter=2)

    def work(comm: Comm) -> list[dict[str, torch.Tensor]]:
        found = []
        state = started(compress, FIXED, comm)
        for i in range(3):
            # A reducer of its own for each process life: what it does depends on the iteration, not on what it has done.
            found.append(tensors(train(compress, FIXED, comm, range(i, i + 1), state)))
        return found

    plain = [job_of(n) for n in (1, 2, 3)]
    for found in Threads(2).run(work):
        assert_same(found[0], plain[0])
        assert_same(found[1], plain[1])
        assert not torch.equal(found[2]["fc.weight"], plain[2]["fc.weight"])


def job_of(iterations: int) -> dict[str, torch.Tensor]:
    return Threads(2).run(lambda comm: tensors(train(None, FIXED, comm, range(iterations))))[0]


def test_parameters_by_pattern() -> None:
    rules = (CompressionRule(name="fc*", method=Method.NONE),)
    for scope in Scope:
        state = train(how(Method.TOP_K, scope=scope, param=rules), FIXED, SoloComm())
        assert state.residual is not None
        left = state.residual.by_name(state.residual.vectors[0])
        assert not left["fc.weight"].any() and not left["fc.bias"].any()
        assert left["conv2.weight"].any()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_threshold_means_the_same_for_any_number_of_workers(workers: int) -> None:
    """All workers have the same gradient: each sends what is above the threshold of the mean, and so does one alone."""
    compress = how(Method.THRESHOLD, threshold=0.02)

    def work(comm: Comm) -> dict[str, torch.Tensor]:
        state, solver = started(compress, FIXED, comm), solver_of(compress)
        reducer, run = reducer_of(FIXED, state, solver, comm), runs_of(LOGICAL, comm.size)[comm.rank]
        same = dataset(2, seed=1)
        pieces = ((k, same, k == run[-1]) for k in run)
        update(state, pieces, KNOBS, reducer, arithmetic(solver), lambda: False)
        return tensors(state)

    for found in Threads(workers).run(work):
        assert_same(found, Threads(1).run(work)[0], 1e-9)
