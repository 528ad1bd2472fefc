"""How logical workers are dealt out and added up, without processes: the tree, the runs, the chunks, the order of sending."""

import gc
import weakref

import pytest
import torch
from engine_help import CPU, SOLVER, ConvNet, Threads, assert_same, dataset, tensors, updates
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stagerun.comm import SoloComm, make_reducer, reduce, runs_of
from stagerun.comm.reduce import FlatReducer, SoloReducer, TreeReducer, cover, is_node, split
from stagerun.engine.state import make_state
from stagerun.errors import PeerError
from stagerun.recipe import Determinism

WORK = st.integers(1, 200).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total)))


# -- dealing out


@given(WORK)
def test_runs_are_contiguous_complete_and_even(work):
    total, workers = work
    runs = runs_of(total, workers)
    assert len(runs) == workers
    assert [k for run in runs for k in run] == list(range(total))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_runs_of_the_design_notes_example():
    assert {len(run) for run in runs_of(128, 48)} == {2, 3}
    assert runs_of(2, 3) == [range(1), range(1, 2), range(2, 2)]


def nodes(low: int, high: int) -> dict[tuple[int, int], int]:
    """Every node of the tree that is no leaf -> where it is cut; by the rule in words: the largest power of two below its width."""
    if high - low == 1:
        return {}
    power = 1
    while power * 2 < high - low:
        power *= 2
    return {(low, high): low + power, **nodes(low, low + power), **nodes(low + power, high)}


@given(st.integers(1, 70))
def test_tree(total):
    tree = nodes(0, total)
    assert len(tree) == total - 1
    assert all(split(low, high) == cut for (low, high), cut in tree.items())
    for low in range(total):
        for high in range(low + 1, total + 1):
            for middle in {low, low + 1, (low + high) // 2, high - 1, tree.get((low, high), low)}:
                assert is_node(low, high, total, middle) == (tree.get((low, high)) == middle)


@given(WORK, st.data())
def test_cover_is_the_fewest_nodes_that_make_up_a_run(work, data):
    total, start = work[0], work[1] - 1
    run = range(start, data.draw(st.integers(start + 1, total)))
    found = cover(run, total)
    assert [k for low, high in found for k in range(low, high)] == list(run)
    tree = nodes(0, total)
    for low, high in found:
        assert high - low == 1 or (low, high) in tree
    parents = {}
    for (low, high), cut in tree.items():
        parents[low, cut] = parents[cut, high] = (low, high)
    for node in found:  # none could be larger
        parent = parents.get(node)
        assert parent is None or not (run.start <= parent[0] and parent[1] <= run.stop)


@given(WORK)
def test_a_ranks_sums_are_the_cover_of_its_run(work):
    """What `add` leaves on the stack is what `finish` believes to be there."""
    total, workers = work
    parameter = nn.Parameter(torch.zeros(1))
    for run in runs_of(total, workers):
        reducer = TreeReducer([parameter], SoloComm(), [range(total)])
        stack: list = []
        for k in run:
            reducer._push(stack, (k, k + 1, torch.tensor([2.0**k], dtype=torch.float64), torch.zeros(1)))
        assert [(low, high) for low, high, _, _ in stack] == cover(run, total)
        assert [float(flat) for _, _, flat, _ in stack] == [
            sum(2.0**k for k in range(*node)) for node in cover(run, total)
        ]


# -- adding up


def test_which_reducer():
    parameters = [nn.Parameter(torch.zeros(2))]
    solo, two = SoloComm(), Threads(2).run(lambda comm: comm)[0]
    assert isinstance(make_reducer(Determinism.FIXED, parameters, solo, 4), SoloReducer)
    assert isinstance(make_reducer(Determinism.FIXED, parameters, two, 4), FlatReducer)
    assert isinstance(make_reducer(Determinism.ELASTIC, parameters, solo, 4), TreeReducer)
    assert isinstance(make_reducer(Determinism.ELASTIC, parameters, two, 4), TreeReducer)
    layouts = {r.layout for r in (SoloReducer, FlatReducer, TreeReducer)}
    assert len(layouts) == 3 and any(str(reduce.CHUNK_BYTES) in layout for layout in layouts)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**9])
def test_chunks_change_neither_the_sum_nor_who_has_it(monkeypatch, chunk_bytes):
    monkeypatch.setattr(reduce, "CHUNK_BYTES", chunk_bytes)
    batches = [dataset(8, seed=i) for i in range(3)]
    one = tensors(updates(ConvNet(), SOLVER, batches, SoloComm())[0])
    for workers in (2, 4):
        for state in Threads(workers).run(lambda comm: updates(ConvNet(), SOLVER, batches, comm)[0]):
            assert_same(one, tensors(state), 1e-11)


class Recorder:
    """A Comm of two ranks whose partner adds nothing; writes down what is sent when."""

    rank, size = 0, 2

    def __init__(self, fail_at: int | None = None) -> None:
        self.log: list[object] = []
        self.fail_at = fail_at

    def all_reduce(self, tensor):
        if len([e for e in self.log if isinstance(e, tuple)]) == self.fail_at:
            raise PeerError("gone", "run again")
        number = len(self.log)
        self.log.append(("send", tensor.numel(), tensor.clone()))
        return lambda: self.log.append(f"wait {number}")


def reducer_and_net(monkeypatch, comm):
    monkeypatch.setattr(reduce, "CHUNK_BYTES", 1)  # a chunk for each parameter
    state = make_state(ConvNet(), SOLVER, CPU)
    parameters = [p.tensor for p in state.solver.parameters]
    return state.model, parameters, FlatReducer(parameters, comm)


def loss_of(model):
    x = torch.from_numpy(dataset(4).images).permute(0, 3, 1, 2).double() * 0.01
    return model(x).square().sum()


def test_gradients_leave_while_backward_still_runs_and_only_with_the_last_logical_worker(monkeypatch):
    comm = Recorder()
    model, parameters, reducer = reducer_and_net(monkeypatch, comm)
    model.conv1.weight.register_hook(lambda g: comm.log.append("backward reaches the first layer"))
    # The unused parameter lies between the two convolutions: what comes after it in the buffer has to wait for `finish`.
    reducer.begin()
    reducer.add(loss_of(model), 0, torch.ones(3, dtype=torch.float64), last=False)
    assert comm.log == ["backward reaches the first layer"]
    comm.log.clear()
    reducer.add(loss_of(model), 1, torch.ones(3, dtype=torch.float64), last=True)
    sent = [e[1] if isinstance(e, tuple) else e for e in comm.log]
    fc, bn2, conv2 = [3, 15], [5, 5], [180]
    assert sent == [3, *fc, *bn2, *conv2, "backward reaches the first layer"]  # the tail goes first
    assert torch.equal(comm.log[0][2], torch.full((3,), 2.0, dtype=torch.float64))
    tail = reducer.finish()
    sent = [e[1] for e in comm.log if isinstance(e, tuple)]
    assert sent == [3, *(p.numel() for p in reversed(parameters))]
    waits = [e for e in comm.log if isinstance(e, str) and e.startswith("wait")]
    assert len(waits) == len(sent)  # none is left under way
    assert torch.equal(tail, torch.full((3,), 2.0, dtype=torch.float64))
    # What was sent is the complete sum of this rank.
    chunks = [e[2] for e in comm.log if isinstance(e, tuple)][1:]
    for parameter, chunk in zip(reversed(parameters), chunks, strict=True):
        assert torch.equal(parameter.grad.flatten().sort().values, chunk.sort().values)


def test_the_order_of_sending_is_that_of_the_buffer_whatever_backward_does(monkeypatch):
    """Two branches whose backward runs in the order in which forward ran them, which may differ from rank to rank."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(2, 3), nn.Linear(2, 4), nn.Linear(2, 5)

        def forward(self, x, order):
            return sum(getattr(self, name)(x).sum() for name in order)

    monkeypatch.setattr(reduce, "CHUNK_BYTES", 1)
    torch.manual_seed(0)
    net, orders = Branches(), []
    for order in ("abc", "cba", "bca"):
        comm = Recorder()
        reducer = FlatReducer(list(net.parameters()), comm)
        reducer.begin()
        reducer.add(net(torch.ones(1, 2), order), 0, torch.zeros(2, dtype=torch.float64), last=True)
        reducer.finish()
        orders.append([e[1] for e in comm.log if isinstance(e, tuple)])
    assert orders == [[2, 5, 10, 4, 8, 3, 6]] * 3


def test_a_peer_lost_in_the_middle_of_backward_is_a_peer_error(monkeypatch):
    comm = Recorder(fail_at=2)
    model, _, reducer = reducer_and_net(monkeypatch, comm)
    reducer.begin()
    with pytest.raises(PeerError):
        reducer.add(loss_of(model), 0, torch.zeros(3, dtype=torch.float64), last=True)


@pytest.mark.parametrize("make", [SoloReducer, lambda p: FlatReducer(p, Recorder())])
def test_gradients_of_the_iteration_before_are_forgotten(make):
    parameter = nn.Parameter(torch.tensor([2.0]))
    reducer = make([parameter])
    for factor in (3.0, 5.0):
        reducer.begin()
        for k in range(2):
            reducer.add((parameter * factor).sum(), k, torch.tensor([factor], dtype=torch.float64), last=k == 1)
        assert reducer.finish().item() == 2 * factor
        assert parameter.grad.item() == 2 * factor


def test_a_stages_network_is_let_go_with_its_reducer():
    """The next stage builds its own; two of them, with the buffer for the gradients, may not fit."""
    model = ConvNet()
    reducer = FlatReducer(list(model.parameters()), Recorder())
    seen = weakref.ref(model.conv1.weight), weakref.ref(reducer), weakref.ref(reducer.flat)
    del model, reducer
    gc.collect()
    assert [ref() for ref in seen] == [None, None, None]
