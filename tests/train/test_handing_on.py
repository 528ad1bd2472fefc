"""What ranks settle while images are copied, on threads: who hands on blocks, when it is known, and what a damaged copy leads to."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest
from engine_help import ThreadComm, Threads

from stagerun.base.errors import DataError, PeerError
from stagerun.base.recipe import Data, ScratchFrom, Source
from stagerun.data.scratch import Original, blocks, layout, look, serving, stage
from stagerun.data.scratch.sharing import Phase
from stagerun.data.write import write_lmdb
from stagerun.system.pulse import Pulse
from stagerun.train import copying, handing_on
from stagerun.train.copying import Copying
from stagerun.train.handing_on import HandingOn

BLOCK = 1 << 16
HOSTS = ["node0", "node1", "node2"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, layout, serving):
        monkeypatch.setattr(module, "BLOCK", BLOCK)
    monkeypatch.setattr(handing_on, "_GATHER_S", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")


@pytest.fixture
def original(tmp_path: Path) -> Original:
    write_lmdb(str(tmp_path / "db"), [i.to_bytes(4, "little") * 500 for i in range(500)])
    return look(str(tmp_path / "db"))


def settled(
    original: Original, needs: list[bool | None], way: ScratchFrom = ScratchFrom.MEASURED
) -> list[tuple[HandingOn, list[str], list[Phase]]]:
    """For each rank, what was settled, the notes, and the phases. `needs`: what a rank offers; None: it comes when the others measure."""

    def one(comm: ThreadComm) -> tuple[HandingOn, list[str], list[Phase]]:
        handing, need, done = HandingOn(comm, [original], way, HOSTS, lambda: False), needs[comm.rank], 0  # type: ignore[arg-type]
        notes, phases = list[str](), list[Phase]()
        exchange = handing.exchange
        assert exchange is not None
        while not handing.settled():
            if need is not None or exchange.phase is not Phase.GATHER:
                exchange.offer([original] if need is not False else [], {})
                exchange.has = frozenset() if need is not False else frozenset({original.name})
            if exchange.phase is Phase.NODES and need:  # no one else measures
                exchange.measured, exchange.rate = True, 1e9
            if exchange.phase is Phase.SOURCE:
                done += 1000
            mine = json_row(handing.row(done))
            note = handing.meet([row_of(told) for told in comm.gather_bytes(mine)], done)
            notes += [note.text] if note is not None else []
            phases.append(exchange.phase)
            time.sleep(0.01)
        handing.close()
        return handing, notes, phases

    return Threads(len(needs)).run(one)


def json_row(row: list[int]) -> bytes:
    return " ".join(map(str, row)).encode()


def row_of(told: bytes) -> list[int]:
    return [int(word) for word in told.split()]


def test_a_late_node_does_not_decide_for_the_others(original: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handing_on, "_SOURCE_S", 0.3)
    monkeypatch.setattr(handing_on, "_SOURCE_MOST_S", 0.6)
    ranks = settled(original, [True, True, None])
    assert [notes for _, notes, _ in ranks[1:]] == [[], []]
    (said,) = ranks[0][1]
    assert "each of 2 nodes reads a part from the source" in said
    exchanges = [handing.exchange for handing, _, _ in ranks]
    assert [e.phase for e in exchanges if e] == [Phase.SHARED] * 3
    assert [e.me for e in exchanges if e] == [0, 1, None]


def test_a_node_that_has_it_is_counted_and_not_waited_for(original: Original, monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures nothing, since it copies nothing."""
    monkeypatch.setattr(handing_on, "_SOURCE_S", 0.2)
    monkeypatch.setattr(handing_on, "MEASURED_S", 100.0)
    (said,) = settled(original, [True, False, True])[0][1]
    assert "2 nodes read it from 1 node that had it" in said


def places(originals: list[Original], way: ScratchFrom) -> list[HandingOn | Exception]:
    def one(comm: ThreadComm) -> HandingOn | Exception:
        handing = HandingOn(comm, [originals[comm.rank]], way, HOSTS, lambda: False)  # type: ignore[arg-type]
        try:
            handing.require()
        except (DataError, PeerError) as error:
            return error
        finally:
            handing.close()
        return handing

    return Threads(len(originals)).run(one)


def test_a_node_that_sees_the_images_by_another_path_takes_no_part(original: Original, tmp_path: Path) -> None:
    """It would be asked for a copy by a name that it doesn't know, and the others would wait for it."""
    there = look(copytree(tmp_path / "db", tmp_path / "there"))
    for found in (ranks := places([there, original, original], ScratchFrom.MEASURED)):
        assert isinstance(found, HandingOn) and list(found._places) == [1, 2]
    for number, found in enumerate(ranks):
        assert isinstance(found, HandingOn) and found.exchange is not None
        found.exchange.needs = frozenset({original.name})
        assert bool(found.trouble()) == (number == 0)
    refused = places([original, original, there], ScratchFrom.NODES)
    assert all(isinstance(error, DataError) and error.message.startswith("node2: ") for error in refused)


def test_a_node_without_an_address_is_refused_where_it_must_have_one(
    original: Original, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(meeting: str, first: bool) -> tuple[int, str, str]:
        raise OSError

    monkeypatch.setattr(handing_on, "own_place", none)
    refused = places([original] * 2, ScratchFrom.NODES)
    assert all(isinstance(error, PeerError) and "node0, node1: no address" in error.message for error in refused)
    assert all(isinstance(found, HandingOn) for found in places([original] * 2, ScratchFrom.MEASURED))


@pytest.fixture
def staged(
    original: Original, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[list[str]]]]:
    """`Copying.first` on three nodes, each with a scratch folder of its own, from node to node: the notes of each."""
    monkeypatch.setattr(copying, "hosts_of", lambda comm: HOSTS)
    for host in HOSTS:
        (tmp_path / host).mkdir()

    def one(comm: ThreadComm) -> list[str]:
        comm.pulse = Pulse()  # type: ignore[attr-defined]
        data = Data(
            train=Source(source="db", path=original.path, images=500),
            scratch=str(tmp_path / HOSTS[comm.rank]),
            scratch_reserve=0.0,
            scratch_from=ScratchFrom.NODES,
        )
        here = Copying(data, [data.train])
        here._host = HOSTS[comm.rank]
        found, steps = [], here.first(comm, lambda: False)  # type: ignore[arg-type]
        try:
            while True:
                found.append(next(steps).text)
        except StopIteration as end:
            assert end.value is False
        finally:
            here.close()
        return found

    yield lambda: Threads(3).run(one)


def test_a_damaged_copy_that_others_have_found_is_mended(
    original: Original, staged: Callable[[], list[list[str]]], tmp_path: Path
) -> None:
    """It is a node's that had it, and would have trained on it."""
    [copy] = stage([original], str(tmp_path / "node1"), 0)
    copy.close()
    with open(Path(copy.path, "data.mdb"), "r+b") as file:
        for at in range(100, original.size, BLOCK):
            file.seek(at)
            file.write(b"\xff\x00\xff\x01")
    notes = staged()[0]
    source = Path(original.path, "data.mdb").read_bytes()
    for host in HOSTS:
        (found,) = (tmp_path / host).glob("stagerun-*/*/data.mdb")
        assert found.read_bytes() == source
    assert any(text.startswith("node1: ") and "was there and damaged" in text for text in notes)
    assert any("other bytes than were read from the source come from node1" in text for text in notes)
    # All is as it was again: nothing is suspect.
    again = staged()[0]
    assert len(again) == 1 and again[0].startswith("the images are in ")
