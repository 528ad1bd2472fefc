"""`method: AUTO`: it is chosen once, kept by what is on disk, and leaves nothing else behind."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import contract
import disks
import pytest
import torch
from facade import CompressionChosen, Event, Note, ResumeRefused, RunFinished
from nan_help import lives, make_schedule

from stagerun import store
from stagerun.language import load
from stagerun.wire.choosing import decided

pytestmark = pytest.mark.long

DENSE = "NONE"
AUTO = "snapshot: 4 compress_param { method: AUTO ratio: 0.1 }"
CHOICE = {"*": DENSE, "conv1.weight": "TOP_K", "fc.weight": "TOP_K"}


def record(out: Path) -> Path:
    return out / "choices" / "main.json"


def choose(schedule: Path, out: Path, **changes: Any) -> None:
    """As if a run of one worker had chosen CHOICE and had then been killed."""
    identity = json.dumps(dict(load(str(schedule)).stages[0].identity), sort_keys=True)
    known = {"stage": "main", "identity": hashlib.sha256(identity.encode()).hexdigest(), "parent": "", "workers": 1}
    record(out).parent.mkdir(parents=True)
    record(out).write_text(json.dumps({**known, "choice": CHOICE, "seconds": {}, **changes}))


def written(folder: Path, data: Path, choice: dict[str, str]) -> Path:
    """The schedule that has this choice in words."""
    ratio = {"TOP_K": "ratio: 0.1"}
    rules = " ".join(f'param {{ name: "{n}" method: {m} {ratio.get(m, "")} }}' for n, m in choice.items() if n != "*")
    memory = "memory: RESIDUAL" if "TOP_K" in choice.values() else ""
    rest = f"method: {choice['*']} {memory} {ratio.get(choice['*'], '')}"
    return make_schedule(folder, data, f"snapshot: 4 compress_param {{ {rest} {rules} }}")


def chosen(events: list[Event]) -> list[CompressionChosen]:
    return [event for event in events if isinstance(event, CompressionChosen)]


def ends(out: Path) -> dict[str, bytes]:
    (end,) = (out / "snapshots").glob("main-00000012-*")
    return {path.name: path.read_bytes() for path in end.glob("*.safetensors")}


def saved(out: Path, iter: int) -> dict[str, Any]:
    (found,) = (out / "snapshots").glob(f"main-{iter:08}-*")
    return json.loads((found / "state.json").read_text())


def test_one_worker_stays_dense_and_says_so(few, tmp_path):
    schedule, plain = make_schedule(tmp_path / "s", few, AUTO), make_schedule(tmp_path / "p", few, "snapshot: 4")
    (event,) = chosen(lives(schedule, tmp_path / "out"))
    assert {method for method, *_ in event.methods} == {DENSE} and event.why == "one worker sends nothing"
    assert saved(tmp_path / "out", 12)["choice"] == {"*": DENSE}
    lives(plain, tmp_path / "plain")
    assert ends(tmp_path / "out") == ends(tmp_path / "plain")
    assert "choice" not in saved(tmp_path / "plain", 12) and not (tmp_path / "plain" / "choices").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_chosen_before_the_first_snapshot_is_kept(few, tmp_path, workers):
    schedule = make_schedule(tmp_path / "s", few, AUTO)
    choose(schedule, tmp_path / "out", workers=workers)
    shown = contract.stagerun(["plan", schedule, "--out", tmp_path / "out"], tmp_path).stdout
    assert f"`main`: AUTO chose for {workers} worker" in shown
    (event,) = chosen(lives(schedule, tmp_path / "out", workers))
    assert "OUT/choices" in event.why and {method for method, *_ in event.methods} == {DENSE, "TOP_K"}
    lives(written(tmp_path / "w", few, CHOICE), tmp_path / "written", workers)
    assert ends(tmp_path / "out") == ends(tmp_path / "written") and "residual.safetensors" in ends(tmp_path / "out")


NOT_ALLOWED = ({"*": "TERNGRAD"}, {"*": DENSE, "nothing": "TOP_K"}, {"fc.weight": "TOP_K"})


@pytest.mark.parametrize(
    "changes",
    [{"identity": "another"}, {"parent": "another"}, {"workers": 2}, *({"choice": choice} for choice in NOT_ALLOWED)],
)
def test_what_does_not_fit_is_chosen_anew(few, tmp_path, changes):
    schedule = make_schedule(tmp_path / "s", few, AUTO, main="max_iter: 1")
    choose(schedule, tmp_path / "out", **changes)
    (event,) = chosen(lives(schedule, tmp_path / "out"))
    assert event.why == "one worker sends nothing"
    assert json.loads(record(tmp_path / "out").read_text())["choice"] == {"*": DENSE}


def test_the_snapshot_has_it_too(few, tmp_path):
    """A run that goes on elsewhere, or after someone has cleared OUT/choices away."""
    schedule = make_schedule(tmp_path / "s", few, AUTO)
    for out in (tmp_path / "straight", tmp_path / "killed"):
        choose(schedule, out)
    lives(schedule, tmp_path / "straight")
    lives(schedule, tmp_path / "killed", kill_after=6)
    assert saved(tmp_path / "killed", 4)["choice"] == CHOICE
    shutil.rmtree(tmp_path / "killed" / "choices")
    (event,) = chosen(lives(schedule, tmp_path / "killed"))
    assert event.why == "as the snapshot has it"
    assert ends(tmp_path / "straight") == ends(tmp_path / "killed")


def test_a_snapshot_that_does_not_say_what_was_chosen_is_refused(few, tmp_path):
    schedule, out, disk = make_schedule(tmp_path / "s", few, AUTO), tmp_path / "out", store.LocalDisk()
    choose(schedule, out)
    lives(schedule, out, kill_after=6)
    (ref,) = store.inventory(disk, out).of("main")
    files = dict(store.read(disk, out, ref))
    content = [name for name in files if name.endswith(".safetensors")]
    for choice in ({}, {"*": "lost"}, *NOT_ALLOWED):
        shutil.rmtree(out / "snapshots" / ref.name)
        files["state.json"] = json.dumps(json.loads(files["state.json"]) | {"choice": choice}).encode()
        about = {"identity": ref.identity, "environment": ref.environment, "parent": ref.parent}
        disks.commit(disk, out, "main", ref.iter, ref.attempt, files, content=content, **about)
        with pytest.raises(ResumeRefused, match="does not say what `method: AUTO` chose"):
            lives(schedule, out)


def test_choosing_leaves_training_as_it_was(few, tmp_path):
    """Weights, BatchNorm's statistics, momentum and what is drawn at random: bit for bit those of a run that was told what to do."""
    schedule = make_schedule(tmp_path / "s", few, AUTO)
    before = torch.get_rng_state()
    events = lives(schedule, tmp_path / "out", workers=2)
    (event,) = chosen(events)
    assert {name for name, _ in event.tried} == {"dense", "TOP_K", "QSGD", "BF16"}
    assert any("timing steps with dense, TOP_K, QSGD" in e.text for e in events if isinstance(e, Note))
    found = json.loads(record(tmp_path / "out").read_text())
    assert found["workers"] == 2
    torch.set_rng_state(before)
    lives(written(tmp_path / "w", few, found["choice"]), tmp_path / "written", workers=2)
    assert ends(tmp_path / "out") == ends(tmp_path / "written")


def test_a_stop_while_it_chooses_leaves_nothing(few, tmp_path):
    schedule = make_schedule(tmp_path / "s", few, AUTO)
    events = lives(schedule, tmp_path / "out", workers=2, stop_after=1)
    assert type(events[-1]).__name__ == "Stopped" and not (tmp_path / "out" / "choices").exists()
    events = lives(schedule, tmp_path / "out", workers=2)
    assert isinstance(events[-1], RunFinished) and len(chosen(events)) == 1


@pytest.mark.parametrize(
    "taken, best, why",
    [
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.5, 0.5, 0.5]}, "TOP_K", "0.50 times as long as dense"),
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.98, 0.98, 0.98]}, DENSE, "nothing is clearly faster"),
        ({DENSE: [1.0, 1.0, 1.0], "TOP_K": [0.5, 1.5, 1.5]}, DENSE, "the fastest of all timed"),
        ({DENSE: [1.0, 1.0, 1.0, 1.0], "TOP_K": [0.5, 0.5, 1.2, 1.2]}, DENSE, "nothing is clearly faster"),
    ],
)
def test_dense_stays_unless_a_method_is_clearly_faster(taken, best, why):
    found, words = decided(taken)
    assert found == best and why in words
