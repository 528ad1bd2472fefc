"""The parts of `sync_param { method: ASYNC }`: the record as bytes, which server has what, a server against plain updates, the hub with
threads, and lines."""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from async_help import wires
from engine_help import SOLVER, peer_error
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stagerun.base.errors import PeerError
from stagerun.base.knobs import Knobs
from stagerun.base.recipe import Solver
from stagerun.engine.asynchronous import shards
from stagerun.engine.asynchronous.hub import Done, Hub, LegEnd, Replay, Work
from stagerun.engine.asynchronous.lines import RemoteDesk, RemoteServer, serve
from stagerun.engine.asynchronous.record import Arrived, Leg, Record, record_of
from stagerun.engine.asynchronous.servers import Push, Server
from stagerun.engine.asynchronous.shards import Shards, flat, needs_whole, placement
from stagerun.engine.asynchronous.tickets import Tickets
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
        lost, order = order[:1], order[1:]
        latest = [max(order[:version], default=-1) for version in range(len(order) + 1)]  # claims that a version has

        def seen(claim: int, most: int, latest: list[int] = latest) -> int:
            return rnd.choice([version for version in range(most + 1) if latest[version] < claim])

        missed = tuple((claim, seen(claim, len(order))) for claim in lost if rnd.random() < 0.5)
        arrived.append(Arrived(tuple(order), tuple(at - seen(claim, at) for at, claim in enumerate(order)), missed))
    replicas = tuple(rnd.randrange(9) for _ in iterations)
    return Leg(first, last, tuple(iterations), replicas, tuple(arrived), rnd.randint(0, 3), rnd.randint(3, 9))


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


def test_a_record_by_its_legs() -> None:
    record = a_record(3)
    assert [record.leg(leg.first) for leg in record.legs] == record.legs and record.leg(record.last) is None
    assert record.up_to(record.legs[1].last).legs == record.legs[:2] and record.up_to(0).last == 0
    assert record.staleness() == [s for leg in record.legs for s in leg.servers[0].staleness]


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_its_size_is_what_is_said_of_it(servers: int) -> None:
    def size(pushes: int) -> int:
        order = tuple(range(pushes))
        arrived = (Arrived(order, (0,) * pushes),) * servers
        return len(Record([Leg(0, pushes, order, (1,) * pushes, arrived)]).encoded())

    assert abs(size(20_000) - size(10_000) - 10_000 * (10 + 8 * servers)) < 100


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
        Replay(1, [leg]).start(leg.first, leg.last, 0, 0)


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


@pytest.mark.parametrize("changes, whole", [({}, False), ({"type": "LARS"}, True), ({"type": "LAMB"}, True), ({"type": "Adam"}, False)])  # fmt: skip
def test_types_that_need_norms_are_not_split(changes: dict[str, str], whole: bool) -> None:
    assert needs_whole(replace(SOLVER, **changes)) is whole
    assert needs_whole(replace(SOLVER, local_lr_auto=True)) is True


def test_vectors_are_cut_up_and_put_together_as_they_lie_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SPLIT_FROM", 20)
    weights = [torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last), torch.randn(5), torch.randn(4, 7)]
    own = [Parameter(f"p{i}", nn.Parameter(w), 1.0, 1.0) for i, w in enumerate(weights)]
    cut = Shards(own, 3, whole=False)
    assert sum(cut.sizes) == sum(w.numel() for w in weights) and [len(p) for p in cut.parts] == [2, 3, 2]
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
        self.shards = Shards(update.parameters, number, needs_whole(update.settings))
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
        return self.each[s].push(Push(claim, iteration, seen, self.shards.packed(s, gradients(iteration)), total))

    def weights(self) -> list[Tensor]:
        found = [torch.zeros_like(p.tensor) for p in self.shards.parameters]
        for s, server in enumerate(self.each):
            self.shards.unpack(s, server.vector, found)
        return found

    def remembered(self, slot: str) -> list[Tensor]:
        found = [torch.zeros_like(p.tensor) for p in self.shards.parameters]
        for s, server in enumerate(self.each):
            self.shards.unpack(s, server.remembered()[slot], found)
        return found


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("type", TYPES)
def test_servers_do_what_one_plain_update_does(type: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a state in the middle of training."""
    monkeypatch.setattr(shards, "SPLIT_FROM", 70)
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
    for slot, kept in plain.history.items():
        if slot == "t":
            counts = torch.cat([server.remembered()["t"] for server in servers.each if server.update is not None])
            assert set(counts.tolist()) == {8}
            continue
        assert all(same(a, kept[p.name]) for a, p in zip(servers.remembered(slot), plain.parameters, strict=True))
    untouched = make_update(parameters(), solver_of(type))
    apply_plainly(untouched, [0, 1])
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(whole.parameters, untouched.parameters, strict=True))


def test_a_server_counts_what_a_push_had_not_seen() -> None:
    servers = Servers(make_update(parameters(), SOLVER), 1)
    assert [servers.push(0, claim, claim, seen) for claim, seen in enumerate([0, 0, 1, 3])] == [0, 1, 1, 0]
    server = servers.each[0]
    version, vector = server.pull(-1)
    assert version == 4 and torch.equal(vector, server.vector) and vector.data_ptr() != server.vector.data_ptr()
    assert server.arrived() == Arrived((0, 1, 2, 3), (0, 1, 1, 0))
    assert servers.moved == [0, 1, 2, 3], "statistics move with each push"


def a_run(seed: int, number: int, pushes: int = 12) -> tuple[Servers, list[Arrived], list[list[Tensor]]]:
    """Pushes that come to each server in an order of its own, and what each had pulled, by claim."""
    rnd = random.Random(seed)
    servers = Servers(make_update(parameters(), SOLVER), number)
    seen: list[list[int]] = []
    pulled: list[list[Tensor]] = []
    under_way: list[list[int]] = [[] for _ in range(number)]
    for claim in range(pushes):
        got = [server.pull(-1) for server in servers.each]
        seen.append([version for version, _ in got])
        pulled.append([vector for _, vector in got])
        for s in range(number):
            under_way[s].append(claim)
            while len(under_way[s]) > rnd.randint(0, 3):
                one = under_way[s].pop(rnd.randrange(len(under_way[s])))
                servers.push(s, one, one, seen[one][s])
    for s in range(number):
        rnd.shuffle(under_way[s])
        for one in under_way[s]:
            servers.push(s, one, one, seen[one][s])
    return servers, [server.arrived() for server in servers.each], pulled


@pytest.mark.parametrize("seed", range(8))
def test_with_a_record_pushes_and_pulls_may_come_in_any_order(seed: int) -> None:
    """Many threads, each with some of the claims in their order; all see what was seen."""
    number = 1 + seed % 3
    run, arrived, pulled = a_run(seed, number)
    again = Servers(make_update(parameters(), SOLVER), number, arrived)
    rnd = random.Random(seed)
    whose: list[list[int]] = [[] for _ in range(1 + seed % 5)]
    for claim in range(12):
        rnd.choice(whose).append(claim)
    wrong: list[str] = []

    def replica(claims: list[int], waits: random.Random) -> None:
        for claim in claims:
            saw = [server.pull(claim) for server in again.each]
            for s, (_, vector) in enumerate(saw):
                if not torch.equal(vector, pulled[claim][s]):
                    wrong.append(f"{claim} saw other weights of {s}")
            time.sleep(waits.random() * 0.01)
            for s in range(number):
                again.push(s, claim, claim, saw[s][0])

    threads = [threading.Thread(target=replica, args=(claims, random.Random(i))) for i, claims in enumerate(whose)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert [server.arrived().order for server in again.each] == [one.order for one in arrived]
    assert [server.arrived().staleness for server in again.each] == [one.staleness for one in arrived]
    assert all(torch.equal(a, b) for a, b in zip(again.weights(), run.weights(), strict=True))
    assert all(not server._kept and not server._waiting for server in again.each), "no version is kept for ever"


def test_a_push_that_a_server_missed_is_not_applied_there_and_sees_what_it_saw() -> None:
    servers = Servers(make_update(parameters(), SOLVER), 1, [Arrived((0, 2), (0, 1), ((1, 1),))])
    server = servers.each[0]
    first = server.vector.clone()
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(server.pull(1)[0]))
    waiting.start()
    assert torch.equal(server.pull(0)[1], first)
    servers.push(0, 1, 1)
    assert not found and server.version == 0
    servers.push(0, 0, 0)
    waiting.join(5)
    assert found == [1]


def test_who_waits_for_a_push_that_will_not_come_hears_of_it() -> None:
    server = Servers(make_update(parameters(), SOLVER), 1, [Arrived((0, 1), (0, 0))]).each[0]
    threading.Timer(0.05, lambda: server.fail(PeerError("gone"))).start()
    with pytest.raises(PeerError, match="gone"):
        server.pull(1)


# -- the hub


def work_through(hub: Hub, replicas: int, last: int, legs: int, slow: float = 5.0) -> list[int]:
    """Each replica in a thread, the last one `slow` times as slow as the others. What was done."""
    done: list[int] = []
    met = threading.Barrier(replicas)

    def replica(r: int) -> None:
        rnd, first = random.Random(r), 0
        for _ in range(3):
            hub.ask(r)
        while first < last:
            met.wait(20)
            if r == 0:
                hub.start(first, min(last, first + legs), 0, 0)
            met.wait(20)
            while not isinstance(work := hub.begin(r, False), LegEnd):
                hub.ask(r)
                time.sleep(rnd.random() * 0.002 * (slow if r == replicas - 1 else 1))
                done_now = Done(work.iteration, r, 0.0, 0.001)
                hub.claim(r, work.iteration)
                hub.done(r, done_now)
                done.append(work.iteration)
            first = work.iter

    threads = [threading.Thread(target=replica, args=(r,), daemon=True) for r in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return done


def test_all_iterations_are_done_once_also_by_replicas_that_differ_in_speed() -> None:
    hub = Hub(4, Tickets(next=0, last=150, max_staleness=3))
    assert sorted(work_through(hub, 4, 150, 40)) == list(range(150))
    assert len(hub.news) == 150


def asked(hub: Hub | Replay, call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Asks in a thread of its own, and lets it come to where it waits."""
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    time.sleep(0.05)
    return thread, answers


def begun(replicas: int, max_staleness: int, last: int = 20) -> Hub:
    hub = Hub(replicas, Tickets(next=0, last=last, max_staleness=max_staleness))
    hub.start(0, last, 0, 0)
    for replica in range(replicas):
        assert isinstance(hub.begin(replica, False), Work)
    return hub


def push(hub: Hub, replica: int, iteration: int) -> None:
    hub.claim(replica, iteration)
    hub.done(replica, Done(iteration, replica, 0.0, 0.001))


def test_an_error_of_one_who_serves_reaches_whoever_asks() -> None:
    hub = begun(2, max_staleness=1)
    push(hub, 0, 0)
    hub.begin(0, False)
    thread, answers = asked(hub, lambda: peer_error(lambda: hub.claim(0, 2)))
    hub.fail(PeerError("a server is gone"))
    thread.join(5)
    assert answers == ["a server is gone"]
    assert peer_error(lambda: hub.begin(0, False)) == "a server is gone"


LEG = Leg(0, 3, (1, 0, 2), (0, 1, 0), (Arrived((0, 1, 2), (0, 0, 0)),))


def test_a_replay_gives_out_claims_in_their_order_also_where_no_loader_has_asked() -> None:
    replay = Replay(1, [LEG])
    replay.start(0, 3, 0, 0)
    assert replay.ask(0) == 1
    for claim, iteration in enumerate(LEG.iterations):
        assert replay.begin(0, False) == Work(iteration, claim) and replay.claim(0, iteration) == claim
        replay.done(0, Done(iteration, 0, 0.0, 0.0))
    assert replay.begin(0, False) == LegEnd(3)
    assert replay.noted(0, LegEnd(3), []) == LEG


def test_a_replay_that_is_stopped_does_what_others_have_to_see() -> None:
    replay = Replay(2, [LEG])
    replay.start(0, 3, 0, 0)
    for replica in (0, 1, 0):
        replay.ask(replica)
    assert replay.begin(1, False) == Work(0, 1), "which waits for the push of claim 0"
    assert replay.begin(0, True) == Work(1, 0)
    for replica in (0, 1):
        replay.done(replica, Done(0, replica, 0.0, 0.0))
    thread, answers = asked(replay, lambda: replay.begin(1, False))
    assert replay.begin(0, True) == LegEnd(0, True)
    thread.join(5)
    assert answers == [LegEnd(0, True)]


# -- lines


def served() -> tuple[RemoteDesk, RemoteServer, Server, Hub, list[object], list[threading.Thread]]:
    """A desk and a server behind lines, and what failed."""
    servers = Servers(make_update(parameters(), SOLVER), 1)
    hub = Hub(1, Tickets(next=0, last=6, max_staleness=2), most_skips=1)
    hub.start(0, 6, 0, 0)
    failed: list[object] = []
    ends = [wires() for _ in range(2)]
    threads = [serve(far, 1, hub, lambda: servers.each[0], lambda _, error: failed.append(error)) for far, _ in ends]
    desk = RemoteDesk(ends[0][1], ends[1][1])
    remote = RemoteServer(ends[0][1], servers.each[0].vector, servers.shards.sizes[0])
    return desk, remote, servers.each[0], hub, failed, threads


def test_over_lines_a_replica_asks_computes_and_pushes_as_one_that_is_there() -> None:
    desk, remote, server, hub, failed, threads = served()
    assert [desk.ask(1) for _ in range(2)] == [0, 1]
    assert desk.begin(1, False) == Work(0)
    version, vector = remote.pull(-1)
    assert version == 0 and torch.equal(vector, server.vector)
    claim = desk.claim(1, 0)
    gradient = torch.randn(len(vector), generator=torch.Generator().manual_seed(4))
    assert (claim, remote.push(Push(claim, 0, 0, gradient, torch.ones((), dtype=torch.float64).reshape(1)))) == (0, 0)
    here = Servers(make_update(parameters(), SOLVER), 1).each[0]
    here.push(Push(0, 0, 0, gradient))
    assert server.order == [0] and torch.equal(server.vector, here.vector)
    desk.done(1, Done(0, 1, 1.5, 0.25))
    for i in (1, 2):
        assert desk.begin(1, False) == Work(i)
        desk.done(1, Done(i, 1, float("nan"), 0.25, wrong="the loss is nän"))
    assert [done.wrong for done, _ in hub.news] == ["", "the loss is nän", "the loss is nän"]
    assert desk.begin(1, False) == LegEnd(3, False, "the loss is nän", 2, 2)
    desk.leave()
    assert desk.ask(1) is None, "a loader may still read ahead"
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    assert failed == []


def test_a_thread_that_serves_hears_that_the_other_end_is_gone_and_closes_its_own() -> None:
    desk, _, _, _, failed, threads = served()
    desk._wire.close()
    threads[0].join(5)
    assert len(failed) == 1 and isinstance(failed[0], PeerError)
