"""`method: AUTO`: it is chosen once, kept by what is on disk, and leaves nothing else behind."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nan_help import lives, make_data, make_schedule

from stagerun.base.errors import ResumeRefused
from stagerun.base.events import CompressionChosen, Event, Note, RunFinished
from stagerun.language import load
from stagerun.plan.link import Speeds
from stagerun.plan.prediction import Link
from stagerun.plan.ways import DENSE, Way
from stagerun.store import LocalDisk
from stagerun.train import choosing, trying
from stagerun.train.choices import Chosen, grouped, identity_of, in_words, of_choice, read_chosen, write_chosen
from stagerun.train.trying import Found

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
        "rates": {},
        "bandwidth": 1e6,
        "latency": 0.0,
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
        {"choice": {"*": "SIGN"}},  # not allowed
        {"choice": {"*": DENSE, "nothing": "TOP_K"}},
        {"choice": {"fc.weight": "TOP_K"}},
        {"rates": {"TOP_K": [1.0]}},
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
    for choice in ({}, {"*": "SIGN"}, {"*": "lost"}, {"*": DENSE, "nothing": "TOP_K"}, {"fc.weight": "TOP_K"}):

        def wrong(files: Any, choice: dict[str, str] = choice) -> Any:
            found = real(files)
            object.__setattr__(found, "choice", choice)
            return found

        monkeypatch.setattr(choosing, "progress_of", wrong)
        with pytest.raises(ResumeRefused, match="does not say what `method: AUTO` chose"):
            lives(schedule, tmp_path / "out")


@pytest.fixture
def two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dense: what comes of a whole choice but for its outcome."""

    def both(*rest: object) -> Any:
        _, rates = real(*rest)
        return [Way(DENSE, {"*": DENSE}, 1.0), Way("twice", {"*": DENSE}, 1.0)], rates

    real = trying._ways
    monkeypatch.setattr(trying, "_ways", both)


@pytest.mark.long
@pytest.mark.usefixtures("two_ways")
def test_choosing_leaves_training_as_it_was(data: Path, tmp_path: Path) -> None:
    """Weights, BatchNorm's statistics, momentum and what is drawn at random: bit for bit those of a run that chose nothing."""
    schedule, plain = make_schedule(tmp_path / "s", data, AUTO), make_schedule(tmp_path / "p", data, "snapshot: 4")
    before = torch.get_rng_state()
    events = lives(schedule, tmp_path / "out", workers=2)
    (event,) = chosen(events)
    assert {name for name, _ in event.tried} == {"dense", "twice"} and event.bandwidth > 0
    texts = [e.text for e in events if isinstance(e, Note)]
    assert any("measuring the link" in text for text in texts) and any("trying" in text for text in texts)
    torch.set_rng_state(before)
    lives(plain, tmp_path / "plain", workers=2)
    assert ends(tmp_path / "out") == ends(tmp_path / "plain")
    found = read_chosen(tmp_path / "out", load(str(schedule)).stages[0])
    assert found is not None and found.workers == 2
    assert found.rates.keys() >= {DENSE, "TOP_K", "QSGD", "INT8", "BF16"} and found.rates[DENSE][2] == 4


def test_a_stop_while_it_chooses_leaves_nothing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule(tmp_path / "s", data, AUTO)

    def nothing(*rest: object) -> Iterator[str]:
        yield "choosing"
        return None

    monkeypatch.setattr(choosing, "find", nothing)
    events = lives(schedule, tmp_path / "out", workers=2)
    assert type(events[-1]).__name__ == "Stopped" and not (tmp_path / "out" / "choices").exists()
    monkeypatch.undo()

    def found(*rest: object) -> Iterator[str]:
        yield "choosing"
        speeds = Speeds(Link(1e6), Link(1e6))
        return Found(choice={"*": DENSE}, why="so", speeds=speeds, seconds={}, rates={})  # type: ignore[return-value]

    monkeypatch.setattr(choosing, "find", found)
    events = lives(schedule, tmp_path / "out", workers=2)
    assert isinstance(events[-1], RunFinished) and chosen(events)[0].why.startswith("so; it took")


def test_in_words() -> None:
    assert in_words([(DENSE, 3)]) == "dense" and in_words([("TOP_K", 3)]) == "TOP_K"
    assert in_words([(DENSE, 1), ("TOP_K", 3)]) == "dense for 1 tensor, TOP_K for 3"
    assert of_choice(CHOICE) == "dense, TOP_K for 2 tensors"
    sizes = {"conv1.weight": 9, "bn.bias": 1, "bn.weight": 1, "x": 2, "fc.weight": 4}
    assert grouped(sizes, CHOICE) == [
        ("TOP_K", 2, 13, "conv1.weight, fc.weight"),
        (DENSE, 3, 4, "bn.bias to x"),
    ]
