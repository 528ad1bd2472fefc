"""Copies from node to node: which way is chosen, that every node gets the bytes of the source, and what a lying or lost node costs."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stagerun.data.scratch import Copy, CopyStopped, Original, blocks, layout, look, serving, sharing, stage, staging
from stagerun.data.scratch.serving import Lost, Neighbour, Place, Server, own_place
from stagerun.data.scratch.sharing import Exchange, Member, Phase, Rates, choose
from stagerun.data.write import write_lmdb

BLOCK = 1 << 16
MB = 10**6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, layout, serving):
        monkeypatch.setattr(module, "BLOCK", BLOCK)


@pytest.fixture
def original(tmp_path: Path) -> Original:
    write_lmdb(str(tmp_path / "db"), [i.to_bytes(4, "little") * 500 for i in range(500)])
    return look(str(tmp_path / "db"))


class Node:
    """One of several in this process, with a scratch folder of its own."""

    def __init__(self, tmp_path: Path, number: int, original: Original) -> None:
        self.host, self.original = f"node{number}", original
        self.scratch = tmp_path / self.host
        self.scratch.mkdir(exist_ok=True)
        self.stopped = False
        family, bound, address = own_place("127.0.0.1", False)
        self.server = Server(family, bound, "token")
        self.place = Place(self.host, family, address, self.server.port)
        self.exchange = Exchange(self.server, "token", lambda: self.stopped)
        self.copy: Copy | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            [self.copy] = stage(
                [self.original], str(self.scratch), 0, stop=lambda: self.stopped, exchange=self.exchange
            )
        except BaseException as error:
            self.error = error


def together(nodes: list[Node], phase: Phase = Phase.SHARED, members: list[Member] | None = None) -> None:
    """As the ranks settle it: all are ready, then all enter the phase."""
    for node in nodes:
        node.thread.start()
    until(lambda: all(node.exchange.ready for node in nodes))
    found = [Member(n.place, n.exchange.needs, n.exchange.has) for n in nodes]
    for number, node in enumerate(nodes):
        node.exchange.begin([*found, *(members or [])], number)
        node.exchange.enter(phase)


def until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def nodes(tmp_path: Path, original: Original) -> Iterator[list[Node]]:
    made = [Node(tmp_path, number, original) for number in range(3)]
    yield made
    for node in made:
        node.stopped = True
        if node.thread.ident is not None:
            node.thread.join(30)
        if node.copy is not None:
            node.copy.close()
        node.server.close()


def finish(nodes: list[Node]) -> list[Copy]:
    for node in nodes:
        node.thread.join(30)
        assert node.error is None and node.copy is not None, node.error
    return [node.copy for node in nodes if node.copy is not None]


def test_each_block_is_read_from_the_source_once(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = blocks.BlockCopy._from_source

    def counted(self: blocks.BlockCopy, piece: memoryview, at: int) -> int:
        count = whole(self, piece, at)
        read.append(count)
        return count

    monkeypatch.setattr(blocks.BlockCopy, "_from_source", counted)
    together(nodes)
    copies = finish(nodes)
    size = nodes[0].original.size
    assert sum(read) == size
    source = Path(nodes[0].original.path, "data.mdb").read_bytes()
    assert all(Path(copy.path, "data.mdb").read_bytes() == source for copy in copies)
    assert len({copy.digest for copy in copies}) == 1
    assert sum(node.exchange.handed for node in nodes) == 2 * size and not any(n.exchange.trouble for n in nodes)


def test_nodes_that_have_it_are_the_source(nodes: list[Node], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    [copy] = stage([nodes[1].original], str(nodes[1].scratch), 0)
    copy.close()

    def none(self: blocks.BlockCopy, piece: memoryview, at: int) -> int:
        raise AssertionError("read from the source")

    monkeypatch.setattr(blocks.BlockCopy, "_from_source", none)
    together(nodes)
    assert [one.how for one in finish(nodes)] == [staging.How.COPIED, staging.How.THERE, staging.How.COPIED]


def test_a_node_that_gives_other_bytes_is_told_and_passed_over(nodes: list[Node]) -> None:
    """Its disk has changed since its copy was made: what comes from there doesn't have the digest that it says."""
    [copy] = stage([nodes[1].original], str(nodes[1].scratch), 0)
    copy.close()
    with open(Path(copy.path, "data.mdb"), "r+b") as file:
        for at in range(100, nodes[1].original.size, BLOCK):
            file.seek(at)
            file.write(b"\xff\x00\xff\x01")
    together(nodes)
    copies = finish(nodes)
    source = Path(nodes[0].original.path, "data.mdb").read_bytes()
    for node, one in zip(nodes, copies, strict=True):
        if node is not nodes[1]:
            assert Path(one.path, "data.mdb").read_bytes() == source
    told = nodes[0].exchange.trouble + nodes[2].exchange.trouble
    assert (
        "other bytes than were read from the source come from node1: its part of the images is read from the source"
        in told
    )


def test_a_node_that_is_gone_costs_its_part(nodes: list[Node], original: Original) -> None:
    gone = nodes.pop()
    gone.server.close()
    member = Member(gone.place, frozenset({original.name}), frozenset())
    together(nodes, members=[member])
    copies = finish(nodes)
    source = Path(original.path, "data.mdb").read_bytes()
    assert all(Path(copy.path, "data.mdb").read_bytes() == source for copy in copies)
    assert all(any("nothing comes any more from node2" in text for text in n.exchange.trouble) for n in nodes)


def test_a_node_that_says_it_has_a_copy_and_gives_none_is_passed_over(nodes: list[Node], original: Original) -> None:
    """Else all would wait for it: it is a source, so nobody reads at the source itself."""
    liar = nodes.pop()
    together(nodes, members=[Member(liar.place, frozenset(), frozenset({original.name}))])
    finish(nodes)
    liar.server.close()
    assert all("no copy is found any more on node2" in node.exchange.trouble[0] for node in nodes)


def test_a_node_that_gets_nothing_itself_is_passed_over(
    nodes: list[Node], original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_STILL_S", 0.2)
    idle = nodes.pop()
    together(nodes, members=[Member(idle.place, frozenset({original.name}), frozenset())])
    finish(nodes)
    idle.server.close()
    assert all("for a minute nothing has come to node2" in node.exchange.trouble[0] for node in nodes)


def test_a_thread_that_waits_for_others_hears_that_another_has_failed(
    nodes: list[Node], original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is told at once, and not when a minute's patience with another node is over."""
    idle, begun = nodes.pop(), time.monotonic()
    monkeypatch.setattr(blocks.BlockCopy, "_written", lambda self, number, digest, room: full())

    def full() -> bool:
        raise OSError(28, "No space left on device")

    together(nodes, members=[Member(idle.place, frozenset({original.name}), frozenset())])
    for node in nodes:
        node.thread.join(50)
        assert node.error is not None and "No space left" in str(node.error)
    assert time.monotonic() < begun + 50
    idle.server.close()


@pytest.mark.parametrize("phase", [Phase.GATHER, Phase.SHARED])
def test_a_stop_is_heard_while_others_are_waited_for(nodes: list[Node], original: Original, phase: Phase) -> None:
    """Two of three take part, and the third, which is alive, never copies anything."""
    idle = nodes.pop()
    together(nodes, phase, [Member(idle.place, frozenset({original.name}), frozenset())])
    time.sleep(0.3)
    for node in nodes:
        assert node.thread.is_alive()
        node.stopped = True
    for node in nodes:
        node.thread.join(50)
        assert isinstance(node.error, CopyStopped)
    idle.server.close()
    # What they had stays, and the next run goes on from it.
    [copy] = stage([original], str(nodes[0].scratch), 0)
    assert Path(copy.path, "data.mdb").read_bytes() == Path(original.path, "data.mdb").read_bytes()
    assert copy.bytes == original.size if phase is Phase.GATHER else copy.bytes < original.size
    copy.close()


@pytest.mark.long
def test_measured_from_the_source_alone(nodes: list[Node]) -> None:
    together(nodes, Phase.NODES)
    until(lambda: all(node.exchange.measured for node in nodes))
    assert all(node.exchange.rate > MB for node in nodes)
    for node in nodes:
        node.exchange.enter(Phase.SOURCE)
    until(lambda: all(node.exchange.own_left == 0 for node in nodes))
    for node in nodes:
        node.exchange.enter(Phase.FROM_SOURCE)
    finish(nodes)
    assert [node.exchange.handed for node in nodes] == [0, 0, 0]


def test_a_stranger_gets_nothing(nodes: list[Node], original: Original) -> None:
    [copy] = stage([original], str(nodes[0].scratch), 0)
    nodes[0].server.shelve(original.name, Path(copy.path), original.size, {0: "0" * 64})
    with pytest.raises(Lost):
        Neighbour(nodes[0].place, "guessed", lambda: False).ask(original.name, [0])
    known = Neighbour(nodes[0].place, "token", lambda: False)
    assert known.ask("another", [0]) == 0 and known.ask(original.name, [0, 1]) == (0, "0" * 64, BLOCK)
    known.close()
    copy.close()


def test_who_takes_nothing_or_never_says_who_it_is_is_let_go(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "SILENT_S", 0.3)
    monkeypatch.setattr(serving, "HELLO_S", 0.3)
    server, place = nodes[0].server, nodes[0].place
    mute, deaf = (socket.create_connection((place.address, place.port)) for _ in range(2))
    deaf.sendall(b'{"token": "token"}\n{"try": 1073741824}\n')
    until(lambda: len(server._open) == 2)
    begun = time.monotonic()
    while server._open:
        with suppress(OSError):
            mute.sendall(b"{")  # something, again and again
        time.sleep(0.05)
        assert time.monotonic() < begun + 50
    mute.close()
    deaf.close()


def test_strangers_leave_room_for_the_jobs_own_nodes_and_files(
    tmp_path: Path, original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HELLO_S", 600.0)
    monkeypatch.setattr(serving, "open_files", lambda wanted: 100)
    node = Node(tmp_path, 0, original)
    strangers, known = [], []
    for _ in range(60):
        strangers.append(socket.create_connection((node.place.address, node.place.port)))
        until(lambda: len(node.server._strangers) == min(len(strangers), 12) == len(node.server._open))
    for _ in range(25):
        known.append(Neighbour(node.place, "token", lambda: False))
        assert known[-1].ask("another", [0]) == 0
    assert not node.server._strangers and len(node.server._open) == 25, "a quarter of the files it may have open"
    with pytest.raises(Lost):
        Neighbour(node.place, "token", lambda: False).ask("another", [0])
    for connection in (*strangers, *known):
        connection.close()
    node.server.close()


def test_an_address_that_is_not_this_hosts_own_is_known_to_the_others_alone() -> None:
    """As a service's, or one of a router that translates."""
    server = Server(socket.AF_INET, "192.0.2.1", "token")
    there = Neighbour(Place("node0", socket.AF_INET, "127.0.0.1", server.port), "token", lambda: False)
    assert there.ask("another", [0]) == 0
    there.close()
    server.close()


@pytest.mark.parametrize(
    "rates, had, from_nodes, words",
    [
        ([(4, 100), (3, 90), (4, 95)], 0, True, "node1 reads 3.0 MB/s from the source, and a node at least 90.0 MB/s from another: "
         "each of 3 nodes reads a part from the source, and hands it on"),
        ([(160, 90), (170, 88)], 0, False, "each of 2 nodes reads all of it from the source"),
        ([(100, 100), (100, 100)], 0, False, "all of it"),  # half as much from the source, and as much over the same network
        ([(100, 170), (100, 170)], 0, True, "hands it on"),
        ([(100, 115)], 2, False, "each of 1 node reads all of it from the source"),
        ([(100, 130)], 2, True, "1 node read it from 2 nodes that had it"),
        ([(0, 50), (0, 60)], 0, True, "node0 reads 0 B/s from the source"),
        ([(50, 60), (50, 0)], 0, False, "at least 0 B/s from another"),
        ([(0, 0)], 1, False, "neither the source nor another node"),
    ],
)  # fmt: skip
def test_the_faster_way(rates: list[tuple[int, int]], had: int, from_nodes: bool, words: str) -> None:
    way = choose([Rates(f"node{n}", source * MB, nodes * MB) for n, (source, nodes) in enumerate(rates)], had)
    assert way.from_nodes is from_nodes and words in way.why
