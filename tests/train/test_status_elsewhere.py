"""Who holds an output folder that a run on another host has: `status` waits for its next beat. And whose folder it is, to the ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_help import ThreadComm, Threads
from test_store_lease import NODE7, NODE8, taken

from stagerun import store
from stagerun.store.lease import Lease
from stagerun.train import status
from stagerun.train.agreement import only_here


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    store.prepare(store.LocalDisk(), tmp_path / "out")
    monkeypatch.setattr(store, "SILENT_S", 0.3)
    monkeypatch.setattr(status, "_LOOK_S", 0.02)
    return tmp_path / "out"


CASES: dict[str, tuple[Callable[[Path, Lease], object], str | None]] = {
    "it beats": (lambda out, held: held.beat(), "node7"),
    "it is silent": (lambda out, held: None, None),
    "it ends": (lambda out, held: held.release(75), None),
    "another takes over": (lambda out, held: taken(out, NODE8), "node8"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sign_of_life_says_who_holds_the_folder(out: Path, name: str) -> None:
    held, said = taken(out, NODE7), list[str]()
    then, host = CASES[name]

    def say(text: str) -> None:
        said.append(text)
        then(out, held)

    found = status.listen(out, say)
    assert (f" on {host}," in found.text) if host is not None and found is not None else found is None is host
    assert len(said) == 1 and "process 12 on node7" in said[0]


def test_a_folder_of_rank_0s_host_alone(out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kind of its file system, and since the others don't see rank 0's life there."""
    taken(out, NODE7)

    def only(*there: bool, kind: str = "xfs") -> list[str]:
        monkeypatch.setattr(store, "local_kind", lambda path: kind)

        def one(comm: ThreadComm) -> str:
            folder = out if there[comm.rank] else tmp_path / "not here"
            return only_here(comm, ["node0", "node1"], str(folder))  # type: ignore[arg-type]

        return Threads(2).run(one)

    assert all("(xfs) of node0 alone" in text for text in only(True, False))
    assert only(True, True) == only(True, False, kind="") == ["", ""]
