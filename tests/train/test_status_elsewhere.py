"""Who holds an output folder that a run on another host has: `status` waits for its next beat."""

from collections.abc import Callable
from pathlib import Path

import pytest
from test_store_lease import NODE7, NODE8, taken

from stagerun import store
from stagerun.store.lease import Lease
from stagerun.train import status


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
