"""The parts of `sync_param { method: ASYNC }`: the record as bytes, which server has what, a server against plain updates, the hub with
threads, and lines."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from async_help import wires
from engine_help import CPU, SOLVER, peer_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stagerun.base.errors import PeerError
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Solver
from stagerun.engine.asynchronous import servers as serving
from stagerun.engine.asynchronous.hub import Done, Hub
from stagerun.engine.asynchronous.lines import hear, say, serve
from stagerun.engine.asynchronous.record import Arrived, Leg, Record, record_of
from stagerun.engine.asynchronous.servers import Server, Shards, flat, placement
from stagerun.engine.asynchronous.tickets import Recorded, Tickets, Work
from stagerun.engine.codec import decode, encode
from stagerun.engine.parameters import Parameter
from stagerun.engine.solvers import WeightUpdate, make_update

pytestmark = pytest.mark.long

# -- the record


def a_leg(rnd: random.Random, first: int, servers: int) -> Leg:
    last = first + rnd.randint(1, 9)
    iterations = [*range(first, last), *(rnd.randrange(first, last) for _ in range(rnd.randint(0, 2)))]
    rnd.shuffle(iterations)
    arrived = []
    for _ in range(servers):
        order = list(range(len(iterations)))
        rnd.shuffle(order)
        latest = [max(order[:version], default=-1) for version in range(len(order) + 1)]  # claims that a version has
        seen = [[v for v in range(at + 1) if latest[v] < claim] for at, claim in enumerate(order)]
        arrived.append(Arrived(tuple(order), tuple(at - rnd.choice(versions) for at, versions in enumerate(seen))))
    replicas = tuple(rnd.randrange(9) for _ in iterations)
    return Leg(first, last, tuple(iterations), replicas, tuple(arrived))


def a_record(seed: int, legs: int = 4) -> Record:
    rnd, found = random.Random(seed), Record()
    servers = rnd.randint(1, 3)
    for _ in range(legs):
        found.legs.append(a_leg(rnd, found.last, servers))
    return found


@given(seed=st.integers(0, 1 << 32), legs=st.integers(0, 5))
def test_a_record_is_what_it_was(seed: int, legs: int) -> None:
    record = a_record(seed, legs)
    assert record_of(record.encoded()) == record


@settings(max_examples=300)
@given(data=st.data(), seed=st.integers(0, 9))
def test_bytes_that_no_run_wrote_are_an_error_and_nothing_else(data: st.DataObject, seed: int) -> None:
    """Wherever a byte is another; and tensors of any type, shape and size in the place of one."""
    whole = a_record(seed, 3).encoded()
    if data.draw(st.booleans()):
        damaged = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        found = bytes(damaged[: data.draw(st.integers(0, len(whole)))]) if data.draw(st.booleans()) else bytes(damaged)
    else:
        tensors = decode(whole)
        name = data.draw(st.sampled_from(sorted(tensors)))
        dtypes = [torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.bool, torch.uint8]
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        number = data.draw(st.sampled_from([0, 1, -1, 1 << 14, -(1 << 62), (1 << 63) - 1]))
        dtype = data.draw(st.sampled_from(dtypes))
        tensors[name] = torch.full(shape, number, dtype=torch.int64).to(dtype)
        if data.draw(st.booleans()):
            del tensors[name]
        found = encode(tensors)
    try:
        record = record_of(found)
    except ValueError:
        return
    for leg in record.legs:  # what training does with it
        assert all(isinstance(i, int) and leg.first <= i < leg.last for i in leg.iterations)
        assert all(isinstance(r, int) for r in leg.replicas)
        for one in leg.servers:
            assert all(isinstance(n, int) for n in (*one.order, *one.staleness))
        Hub(1, Recorded([leg])).start(leg.first, leg.last)


def test_a_push_that_a_server_lacks_is_of_a_version_that_went_on_without_dead_workers() -> None:
    leg = Leg(0, 2, (0, 1), (0, 1), (Arrived((0, 1), (0, 0)), Arrived((0,), (0,))))
    with pytest.raises(ValueError, match="its leg at iteration 0 is not one that a run has"):
        record_of(Record([leg]).encoded())


# -- which server has what


@given(
    sizes=st.lists(st.integers(1, 3_000_000), min_size=1, max_size=12), servers=st.integers(1, 9), whole=st.booleans()
)
def test_each_element_is_on_one_server_where_mxnet_has_it(sizes: list[int], servers: int, whole: bool) -> None:
    parts = placement(sizes, servers, whole)
    assert len(parts) == servers
    for index, size in enumerate(sizes):
        here = {s: (p.begin, p.end) for s, own in enumerate(parts) for p in own if p.index == index}
        if size < 1_000_000 or whole or servers == 1:
            assert here == {index * 9973 % servers: (0, size)}
            continue
        assert [end - begin for _, (begin, end) in sorted(here.items())] == [
            size * (i + 1) // servers - size * i // servers for i in range(servers)
        ]
        ends = [here[s] for s in range(servers)]
        assert ends[0][0] == 0 and ends[-1][1] == size and all(a[1] == b[0] for a, b in pairwise(ends))


def test_vectors_are_cut_up_and_put_together_as_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SPLIT_FROM", 20)
    weights = [torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last), torch.randn(5), torch.randn(4, 7)]
    own = [Parameter(f"p{i}", nn.Parameter(w), 1.0, 1.0) for i, w in enumerate(weights)]
    cut = Shards(own, 3, SOLVER)
    assert [len(p) for p in cut.parts] == [2, 3, 2]
    new = [torch.zeros_like(w) for w in weights]
    for s in range(3):
        cut.unpack(s, cut.packed(s, [p.tensor for p in own]), new)
    assert all(torch.equal(a, b) for a, b in zip(new, weights, strict=True))
    assert flat(weights[0])[1] == weights[0][0, 1, 0, 0], "channels are side by side"
    contiguous = {p.name: p.tensor.detach().contiguous() for p in own}
    assert torch.equal(cut.packed(0, cut.gradients(contiguous)), cut.packed(0, [p.tensor for p in own]))


# -- a server

TYPES = ["SGD", "Nesterov", "Adam", "AdamW", "AdaGrad", "AdaDelta", "RMSProp", "LARS", "LAMB"]


def solver_of(type: str) -> Solver:
    return replace(SOLVER, type=type, momentum2=0.99, delta=1e-6, rms_decay=0.9)


def parameters(seed: int = 1) -> list[Parameter]:
    made = torch.Generator().manual_seed(seed)
    shapes = [(6, 5, 2, 2), (7,), (9, 8)]
    return [
        Parameter(f"p{i}", nn.Parameter(torch.randn(*shape, generator=made)), 1.0 + i, 1.0 - i / 4)
        for i, shape in enumerate(shapes)
    ]


def knobs(i: int) -> Knobs:
    return Knobs(0.05 / (i + 1), 0.9 - 0.01 * i, 0.01)


def gradients(i: int) -> list[Tensor]:
    return [p.tensor.detach() for p in parameters(100 + i)]


def apply_plainly(update: WeightUpdate, iterations: list[int]) -> None:
    for i in iterations:
        for p, g in zip(update.parameters, gradients(i), strict=True):
            p.tensor.grad = g.clone()
        update.update(knobs(i))


class Servers:
    """The servers of one leg, over the parameters of `update`."""

    def __init__(self, update: WeightUpdate, number: int, recorded: list[Arrived] | None = None) -> None:
        self.shards = Shards(update.parameters, number, update.settings)
        self.moved: list[float] = []
        self.each = [
            Server(
                s,
                self.shards,
                update,
                knobs,
                lambda total: self.moved.append(float(total)),
                recorded=recorded[s] if recorded else None,
            )
            for s in range(number)
        ]

    def push(self, s: int, claim: int, iteration: int, seen: int = 0) -> int:
        total = torch.tensor(float(iteration)) if s == 0 else None
        return self.each[s].push(claim, seen, iteration, self.shards.packed(s, gradients(iteration)), total)

    def weights(self) -> list[Tensor]:
        found = [torch.zeros_like(p.tensor) for p in self.shards.parameters]
        for s, server in enumerate(self.each):
            self.shards.unpack(s, server.vector, found)
        return found

    def remembered(self) -> list[list[Tensor]]:
        """By slot."""
        found: list[list[Tensor]] = []
        for s, server in enumerate(self.each):
            for n, vector in enumerate(server.remembered()):
                if n == len(found):
                    found.append([torch.zeros_like(p.tensor) for p in self.shards.parameters])
                self.shards.unpack(s, vector, found[n])
        return found


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("type", TYPES)
def test_servers_do_what_one_plain_update_does(type: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a state in the middle of training."""
    monkeypatch.setattr(serving, "SPLIT_FROM", 70)
    plain, whole = make_update(parameters(), solver_of(type)), make_update(parameters(), solver_of(type))
    for update in (plain, whole):
        apply_plainly(update, [0, 1])
    servers = Servers(whole, number)
    for i in range(2, 8):
        for s in range(number):
            servers.push(s, i - 2, i)
    apply_plainly(plain, list(range(2, 8)))

    def same(a: Tensor, b: Tensor) -> bool:
        # Torch computes the last elements of a vector by other instructions, which round a lerp otherwise.
        split = number > 1 and type in ("Adam", "AdamW")
        return torch.allclose(a, b, rtol=1e-5) if split else torch.equal(a, b)

    assert all(same(a, p.tensor) for a, p in zip(servers.weights(), plain.parameters, strict=True))
    slots = [[kept[p.name] for p in plain.parameters] for slot, kept in plain.history.items() if slot != "t"]
    for found, kept in zip(servers.remembered(), slots, strict=True):
        assert all(same(a, b) for a, b in zip(found, kept, strict=True))
    untouched = make_update(parameters(), solver_of(type))
    apply_plainly(untouched, [0, 1])
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(whole.parameters, untouched.parameters, strict=True))


def test_who_waits_for_a_push_that_will_not_come_hears_of_it() -> None:
    server = Servers(make_update(parameters(), SOLVER), 1, [Arrived((0, 1), (0, 0))]).each[0]
    threading.Timer(0.05, lambda: server.fail(PeerError("gone"))).start()
    with pytest.raises(PeerError, match="gone"):
        server.pull(1)


# -- the hub


def test_an_error_of_one_who_serves_reaches_whoever_asks() -> None:
    hub = Hub(2, Tickets(next=0, last=20, max_staleness=1))
    hub.start(0, 20)
    for replica in range(2):
        assert isinstance(hub.begin(replica, False), Work)
    hub.begin(0, False, Done(0, 0, 0.0, 0.001, hub.claim(0, 0)))
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(peer_error(lambda: hub.claim(0, 2))), daemon=True)
    thread.start()
    time.sleep(0.05)
    hub.fail(PeerError("a server is gone"))
    thread.join(5)
    assert answers == ["a server is gone"] == [peer_error(lambda: hub.begin(0, False))]


# -- lines


def test_a_thread_answers_until_the_other_end_leaves_or_is_gone() -> None:
    failed: list[BaseException] = []

    def answer(words: Sequence[Any], vectors: Sequence[Tensor]) -> tuple[Sequence[Any], Sequence[Tensor]]:
        return [*words, "ä"], [v + 1 for v in vectors]

    (far, near), (gone, end) = wires(), wires()
    threads = [serve(one, CPU, answer, failed.append) for one in (far, gone)]
    say(near, ["push", 3, None], [torch.ones(2), torch.zeros(0), torch.ones(1, dtype=torch.float64)])
    words, vectors = hear(near, CPU)
    assert words == ["push", 3, None, "ä"]
    assert [(v.tolist(), v.dtype) for v in vectors] == [
        ([2, 2], torch.float32),
        ([], torch.float32),
        ([2], torch.float64),
    ]
    say(near, ["leave"])
    threads[0].join(5)
    assert not failed
    end.close()
    threads[1].join(5)
    assert len(failed) == 1 and isinstance(failed[0], PeerError) and not any(t.is_alive() for t in threads)
