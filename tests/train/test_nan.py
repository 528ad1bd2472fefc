"""`on_nan`: what an iteration with a loss, gradients or statistics that are no numbers leaves as it was; where training goes back to."""

import math
from dataclasses import replace
from typing import Any

import engine_help
import facade
import pytest
import torch
from engine_help import CPU, KNOBS, SOLVER, ConvNet, Linear, Threads, arithmetic, assert_same, cut, dataset, updates
from facade import Determinism, Diverged, Iterated, Knobs, NotFinite, SnapshotRef, TrainState, make_state, update
from test_engine_loop import device_batches, stage_loop
from test_plan import inventory, schedule, snapshot
from torch import Tensor

from stagerun.comm import SoloComm, make_reducer

CONV = replace(SOLVER, batch_size=24, device_batch_size=4, ema_decay=0.9)


# -- one update


def all_of(state: TrainState) -> dict[str, Tensor]:
    averages = {f"average {name}": t.clone() for name, t in facade.average(state).items()}
    return engine_help.tensors(state) | averages


def spoiled(state: TrainState, what: str, comm: Any, determinism: Determinism) -> facade.Outcome:
    """One update in which the last logical worker alone meets infinity: in the loss, in one gradient, or in BatchNorm's statistics.
    The loss is finite in the latter two."""
    batch, model = dataset(24), state.model
    batch.images[20:] = 7
    reducer = make_reducer(determinism, [p.tensor for p in state.solver.parameters], comm, 6)
    run = range(6) if comm.size == 1 else (range(3), range(3, 6))[comm.rank]
    now = [0]

    def pieces():
        for now[0] in run:
            yield now[0], cut(batch, 4 * now[0], 4 * now[0] + 4), now[0] == run[-1]

    def spoil(value: Tensor) -> Tensor:
        return value * math.inf if now[0] == 5 else value

    def after_bn(bn, inputs, output) -> None:
        bn.batch_var.data.copy_(spoil(bn.batch_var))

    hook = {
        "loss": lambda: model.fc.register_forward_hook(lambda module, inputs, output: spoil(output)),
        "gradient": lambda: model.conv1.weight.register_hook(spoil),
        "statistics": lambda: model.bn2.register_forward_hook(after_bn),
    }[what]()
    try:
        return update(state, pieces(), KNOBS, reducer, arithmetic(CONV), lambda: False)
    finally:
        hook.remove()


@pytest.mark.parametrize("determinism", Determinism)
@pytest.mark.parametrize(
    "what, words",
    [("loss", "the loss is"), ("gradient", "the gradient of `conv1.weight` is"), ("statistics", "BatchNorm")],
)
def test_an_update_that_is_not_finite_leaves_no_trace_on_any_rank(what, words, determinism):
    """The one after it has the bits that it has without the one that failed."""

    def work(comm):
        batches = [dataset(24, seed=1), dataset(24, seed=2)]
        state = updates(ConvNet(), CONV, batches, comm, determinism)[0]
        before = all_of(state)
        outcome = spoiled(state, what, comm, determinism)
        after = all_of(state)
        then = all_of(updates(ConvNet(), CONV, [dataset(24, seed=3)], comm, determinism, state=state)[0])
        return before, after, then, outcome, state.iter

    straight = updates(ConvNet(), CONV, [dataset(24, seed=s) for s in (1, 2, 3)], SoloComm(), determinism)[0]
    for workers in (1, 2):
        for before, after, then, outcome, iterations in Threads(workers).run(work):
            assert_same(before, after)
            assert all(torch.isfinite(t).all() for t in then.values()) and iterations == 3
            if workers == 1:
                assert_same(then, all_of(straight))
            assert math.isfinite(outcome.loss) == (what != "loss")
            assert words in outcome.wrong


def test_large_gradients_are_clipped_and_not_forgotten():
    solver = replace(SOLVER, precision=facade.Precision.FP32, clip_gradients=1.0)
    state = make_state(Linear(), solver, CPU)
    state.model.fc.weight.register_hook(lambda g: torch.full_like(g, 1e25))
    before = state.model.fc.weight.detach().clone()
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 4)
    pieces = ((k, cut(dataset(8), 2 * k, 2 * k + 2), k == 3) for k in range(4))
    update(state, pieces, Knobs(1.0, 0.0, 0.0), reducer, arithmetic(solver), lambda: False)
    moved = torch.linalg.vector_norm(before - state.model.fc.weight.detach())
    assert math.isclose(moved, 1.0, rel_tol=1e-4), "by the learning rate times the limit"


# -- the loop


def fresh(rollbacks: int = 0) -> TrainState:
    state = make_state(Linear(), SOLVER, CPU)
    state.rollbacks = rollbacks
    return state


def run_loop(loop: facade.StageLoop, state: TrainState, bad: set[int], stop=lambda: False) -> list[Any]:
    """The events until the loop ends, Diverged as the last one's stand-in. In the iterations in `bad` the loss is infinite."""
    hook = state.model.fc.register_forward_hook(lambda *args: args[2] * math.inf if state.iter in bad else args[2])
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 4)
    seen: list[Any] = []
    try:
        for event in facade.train(loop, state, device_batches(loop, state.iter), reducer, stop):
            seen.append(event)
    except Diverged as error:
        seen.append(error)
    finally:
        hook.remove()
    return seen


def short(events: list[Any]) -> str:
    """Iterations by their number, others with what they are."""
    kinds = {Iterated: lambda e: "", NotFinite: lambda e: f"{e.done} ", Diverged: lambda e: "Diverged"}
    told = (kinds.get(type(e), lambda e: f"{type(e).__name__} ")(e) + str(getattr(e, "iter", "")) for e in events)
    return ", ".join(told)


def test_skipped_iterations_count_and_what_is_due_after_them_is_done():
    loop = stage_loop(on_nan=facade.recipe.OnNan.SKIP, max_nan=2, max_iter=7, test_interval=0)
    events = run_loop(loop, state := fresh(), {2, 3, 5})
    assert short(events) == "1, 2, SKIP 2, SnapshotDue 3, SKIP 3, 5, SKIP 5, SnapshotDue 6, 7"
    failed = [e for e in events if isinstance(e, NotFinite)]
    assert [(e.number, e.most, e.position, e.images) for e in failed] == [(1, 2, 36, 8), (2, 2, 44, 8), (1, 2, 60, 8)]
    assert (state.iter, state.skips, state.skips_in_all) == (7, 0, 3)
    assert [e.lr for e in events if isinstance(e, Iterated)] == [0.01, 0.02, 0.05, 0.07], "that of the iteration"


def test_one_skip_too_many_in_a_row_ends_it_also_where_it_was_interrupted():
    loop = stage_loop(on_nan=facade.recipe.OnNan.SKIP, max_nan=2, snapshot=0, test_interval=0)
    assert short(run_loop(loop, fresh(), {2, 3, 4})) == "1, 2, SKIP 2, SKIP 3, STOP 4, Diverged"
    state = fresh()
    assert short(run_loop(loop, state, {2, 3, 4}, stop=lambda: state.iter >= 3)) == "1, 2, SKIP 2, SKIP 3, Stopped 4"
    assert state.skips == 2  # what a snapshot holds, and gives back
    events = run_loop(loop, state, {2, 3, 4})
    assert short(events) == "STOP 4, Diverged"
    assert "the 2 before it, which were skipped, and max_nan is 2" in events[-1].message


def test_a_stage_of_which_nothing_is_left_is_none_where_it_is_stopped_either_and_a_piece_may_be():
    loop = stage_loop(on_nan=facade.recipe.OnNan.SKIP, max_nan=9, max_iter=3, test_interval=0)
    state = fresh()
    assert short(run_loop(loop, state, {0, 1, 2}, lambda: state.iter == 2)) == "SKIP 0, SKIP 1, SKIP 2, Diverged"
    assert short(run_loop(replace(loop, is_piece=True), fresh(), {0, 1, 2})) == "SKIP 0, SKIP 1, SKIP 2"


def test_a_rollback_leaves_the_loop_and_too_many_end_it():
    loop = stage_loop(on_nan=facade.recipe.OnNan.ROLLBACK, max_nan=2, snapshot=0, test_interval=0)
    assert short(run_loop(loop, fresh(rollbacks=1), {4})) == "1, 2, 3, 4, ROLLBACK 4"
    events = run_loop(loop, fresh(rollbacks=2), {4})
    assert short(events) == "1, 2, 3, 4, STOP 4, Diverged"
    assert "has gone back 2 times, and max_nan is 2" in events[-1].message


@pytest.mark.parametrize("stops", [False, True])
def test_weights_that_an_update_has_spoiled_are_a_failure_where_a_snapshot_is_due(stops):
    """Elsewhere the next loss tells, also where the run is asked to stop in between: nothing can be saved there."""

    def burst(at: int) -> list[Any]:
        """Each of the two is a number, and gradients and weights are; their product is none."""
        state = fresh()
        knobs = lambda i: Knobs(1e300, 0.9, 1e300) if i == at else Knobs(0.01, 0.9, 0.0)  # noqa: E731
        return run_loop(replace(loop, knobs=knobs), state, set(), lambda: stops and state.iter >= at)

    loop = stage_loop(on_nan=facade.recipe.OnNan.ROLLBACK, max_nan=2, max_iter=7, test_interval=0)
    assert short(burst(2)) == "1, 2, 3, ROLLBACK 2"
    assert "a weight, or what is remembered of its updates, is not finite" in burst(2)[-1].what
    assert short(burst(3)) == "1, 2, 3, SnapshotDue 3, 4, ROLLBACK 4"


# -- the plan


def ref(iter: int, skipped: int = 0, attempt: int = 1) -> SnapshotRef:
    of = schedule()
    first = of.stages[0]
    return replace(snapshot(of, first.name, iter, "", attempt), skipped=skipped)


def test_a_rollback_goes_to_scheduled_snapshots_of_its_own_way():
    of = schedule()
    stage = replace(of.stages[0], solver=replace(of.stages[0].solver, snapshot=2))
    other = replace(ref(2, attempt=4), parent="other")
    changed = replace(ref(2, attempt=5), identity={"solver.base_lr": "9"})
    known = inventory(ref(2), ref(3), ref(4, attempt=2), ref(4, 40, attempt=3), ref(6), other, changed)

    def found(skipped: int, iter: int, branches: tuple[int, ...] = ()) -> list[tuple[int, int]]:
        return [(r.skipped, r.iter) for r in facade.targets(known, stage, branches, "", skipped, iter)]

    # Not 3, where somebody stopped; not 6, which it has not come to; not 40, which came later.
    assert found(0, 5) == [(0, 4), (0, 2)]
    assert found(0, 3) == [(0, 2)] and found(0, 3, (3,)) == [(0, 3), (0, 2)]
    assert found(40, 5) == [(40, 4), (0, 6), (0, 4), (0, 2)]
    assert found(0, 1) == []
