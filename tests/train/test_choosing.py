"""`method: AUTO`: it is chosen once, kept by what is on disk, and leaves nothing else behind."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from facade import CompressionChosen, Event, Note, ResumeRefused, RunFinished
from nan_help import lives, make_data, make_schedule

from stagerun.language import load
from stagerun.store import LocalDisk
from stagerun.train import choosing
from stagerun.train.choices import DENSE, Chosen, identity_of, in_words, read_chosen, write_chosen

AUTO = "snapshot: 4 compress_param { method: AUTO ratio: 0.1 }"
CHOICE = {"*": DENSE, "conv1.weight": "TOP_K", "fc.weight": "TOP_K"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "lmdb")


def choose(schedule: Path, out: Path, workers: int = 1, **changes: Any) -> None:
    """As if a run had chosen CHOICE and had then been killed."""
    stage = load(str(schedule)).stages[0]
    fields: dict[str, Any] = {
        "stage": stage.name,
        "identity": identity_of(stage),
        "parent": "",
        "workers": workers,
        "choice": CHOICE,
        "seconds": {},
    }
    write_chosen(LocalDisk(), out, Chosen(**fields | changes))


def chosen(events: list[Event]) -> list[CompressionChosen]:
    return [event for event in events if isinstance(event, CompressionChosen)]


def ends(out: Path) -> dict[str, bytes]:
    (end,) = (out / "snapshots").glob("main-00000012-*")
    return {path.name: path.read_bytes() for path in end.glob("*.safetensors")}


def saved(out: Path, iter: int) -> dict[str, Any]:
    (found,) = (out / "snapshots").glob(f"main-{iter:08}-*")
    return json.loads((found / "state.json").read_text())  # type: ignore[no-any-return]


def test_one_worker_stays_dense_and_says_so(data: Path, tmp_path: Path) -> None:
    schedule, plain = make_schedule(tmp_path / "s", data, AUTO), make_schedule(tmp_path / "p", data, "snapshot: 4")
    (event,) = chosen(lives(schedule, tmp_path / "out"))
    assert in_words((m, t) for m, t, *_ in event.methods) == "dense" and event.why == "one worker sends nothing"
    assert saved(tmp_path / "out", 12)["choice"] == {"*": DENSE}
    lives(plain, tmp_path / "plain")
    assert ends(tmp_path / "out") == ends(tmp_path / "plain")
    assert "choice" not in saved(tmp_path / "plain", 12) and not (tmp_path / "plain" / "choices").exists()


@pytest.mark.long
def test_what_was_chosen_before_the_first_snapshot_is_kept(data: Path, tmp_path: Path) -> None:
    schedule = make_schedule(tmp_path / "s", data, AUTO)
    rules = " ".join(f'param {{ name: "{name}" method: {m} }}' for name, m in CHOICE.items() if name != "*")
    written = make_schedule(
        tmp_path / "w",
        data,
        f"snapshot: 4 compress_param {{ method: NONE memory: RESIDUAL {rules} }}".replace(
            "TOP_K }", "TOP_K ratio: 0.1 }"
        ),
    )
    choose(schedule, tmp_path / "out")
    (event,) = chosen(lives(schedule, tmp_path / "out"))
    assert "OUT/choices" in event.why and {method for method, *_ in event.methods} == {DENSE, "TOP_K"}
    lives(written, tmp_path / "written")
    assert ends(tmp_path / "out") == ends(tmp_path / "written") and "residual.safetensors" in ends(tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": "another"},
        {"parent": "another"},
        {"workers": 2},
        {"choice": {"*": "TERNGRAD"}},  # not allowed
        {"choice": {"*": DENSE, "nothing": "TOP_K"}},
        {"choice": {"fc.weight": "TOP_K"}},
    ],
)
def test_what_does_not_fit_is_chosen_anew(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    schedule = make_schedule(tmp_path / "s", data, AUTO, main="max_iter: 1")
    choose(schedule, tmp_path / "out", **changes)
    (event,) = chosen(lives(schedule, tmp_path / "out"))
    assert event.why == "one worker sends nothing"
    found = read_chosen(tmp_path / "out", load(str(schedule)).stages[0])
    assert found is not None and found.choice == {"*": DENSE}


@pytest.mark.long
def test_the_snapshot_has_it_too(data: Path, tmp_path: Path) -> None:
    """A run that goes on elsewhere, or after someone has cleared OUT/choices away."""
    schedule = make_schedule(tmp_path / "s", data, AUTO)
    for out in (tmp_path / "straight", tmp_path / "killed"):
        choose(schedule, out)
    lives(schedule, tmp_path / "straight")
    lives(schedule, tmp_path / "killed", kill_after=6)
    assert saved(tmp_path / "killed", 4)["choice"] == CHOICE
    shutil.rmtree(tmp_path / "killed" / "choices")
    (event,) = chosen(lives(schedule, tmp_path / "killed"))
    assert event.why == "as the snapshot has it"
    assert ends(tmp_path / "straight") == ends(tmp_path / "killed")


@pytest.mark.long
def test_a_snapshot_that_does_not_say_what_was_chosen_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(tmp_path / "s", data, AUTO)
    choose(schedule, tmp_path / "out")
    lives(schedule, tmp_path / "out", kill_after=6)
    real = choosing.progress_of
    for choice in ({}, {"*": "TERNGRAD"}, {"*": "lost"}, {"*": DENSE, "nothing": "TOP_K"}, {"fc.weight": "TOP_K"}):

        def wrong(files: Any, choice: dict[str, str] = choice) -> Any:
            found = real(files)
            object.__setattr__(found, "choice", choice)
            return found

        monkeypatch.setattr(choosing, "progress_of", wrong)
        with pytest.raises(ResumeRefused, match="does not say what `method: AUTO` chose"):
            lives(schedule, tmp_path / "out")


@pytest.mark.long
def test_choosing_leaves_training_as_it_was(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, BatchNorm's statistics, momentum and what is drawn at random: bit for bit those of a run that chose nothing."""
    monkeypatch.setattr(choosing, "CLEARLY", 0.0)  # dense stays, whatever is fastest here
    schedule, plain = make_schedule(tmp_path / "s", data, AUTO), make_schedule(tmp_path / "p", data, "snapshot: 4")
    before = torch.get_rng_state()
    events = lives(schedule, tmp_path / "out", workers=2)
    (event,) = chosen(events)
    assert {name for name, _ in event.tried} == {"dense", "TOP_K", "QSGD", "BF16"}
    assert any("timing steps with dense, TOP_K, QSGD" in e.text for e in events if isinstance(e, Note))
    torch.set_rng_state(before)
    lives(plain, tmp_path / "plain", workers=2)
    assert ends(tmp_path / "out") == ends(tmp_path / "plain")
    found = read_chosen(tmp_path / "out", load(str(schedule)).stages[0])
    assert found is not None and found.workers == 2 and found.choice == {"*": DENSE}


def test_a_stop_while_it_chooses_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(tmp_path / "s", data, AUTO)
    monkeypatch.setattr(choosing, "_race", lambda *rest: {})
    events = lives(schedule, tmp_path / "out", workers=2)
    assert type(events[-1]).__name__ == "Stopped" and not (tmp_path / "out" / "choices").exists()
    monkeypatch.setattr(choosing, "_race", lambda *rest: {DENSE: [1.0], "TOP_K": [2.0]})
    events = lives(schedule, tmp_path / "out", workers=2)
    assert isinstance(events[-1], RunFinished) and chosen(events)[0].why.startswith("the fastest of those")


@pytest.mark.parametrize(
    "taken, best, why",
    [
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.5, 0.5, 0.5]}, "TOP_K", "0.50 times as long as dense"),
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.98, 0.98, 0.98]}, DENSE, "nothing is clearly faster"),
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.5, 1.5, 1.5]}, DENSE, "the fastest of those"),
        ({DENSE: [1.0, 1.0, 1.0, 1.0], "TOP_K": [0.5, 0.5, 1.2, 1.2]}, DENSE, "nothing is clearly faster"),
    ],
)
def test_dense_stays_unless_a_method_is_clearly_faster(taken: dict[str, list[float]], best: str, why: str) -> None:
    found, words = choosing.decided(taken)
    assert found == best and why in words
