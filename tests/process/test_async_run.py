"""`stagerun run` with `sync_param { method: ASYNC }`: workers that are killed or stopped, runs that go on, and replays of all of it by
other numbers of workers, to the same bits."""

import json
import os
import signal
import time
from pathlib import Path

import processes
import pytest
import small

ITERATIONS = 60
SCHEDULE = """
name: "async" keep_snapshots: 9
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}/train_lmdb" images: 600 }} val {{ source: "{data}/val_lmdb" images: 100 }} }}
solver {{
  batch_size: 8 device_batch_size: 4 momentum: 0.9 weight_decay: 5e-4
  transform_param {{ pad: 2 mirror: true crop_size: 20 mean_value: 73 scale: 0.0111 }}
  snapshot: 20 display: 10 test_batch_size: 50 test_iter: 1
}}
stage {{ name: "one" }}
"""
ONE = """base_lr: 0.01 lr_policy: "fixed" max_iter: {iterations}
sync_param {{ method: ASYNC replicas: 4 max_staleness: {staleness} }}
"""


@pytest.fixture
def schedule(data: Path, tmp_path: Path) -> Path:
    return make_schedule(tmp_path / "s", data)


def make_schedule(folder: Path, data: Path, staleness: int = 4) -> Path:
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=data))
    (folder / "one.prototxt").write_text(ONE.format(iterations=ITERATIONS, staleness=staleness))
    return folder


def events(out: Path, kind: str) -> list[dict[str, object]]:
    try:
        lines = (out / "log.jsonl").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        if f'"{kind}"' in line and line.endswith("}"):
            found.append(json.loads(line))
    return [event for event in found if event["event"] == kind]


def wait_for(out: Path, iterations: int, run: processes.Run) -> None:
    end = time.monotonic() + 120
    while len(events(out, "Iterated")) < iterations:
        assert run.process.poll() is None, run.wait()
        assert time.monotonic() < end
        time.sleep(0.01)


def last(out: Path) -> dict[str, bytes]:
    """The files of the newest snapshot: weights, momentum, record."""
    newest = max((out / "snapshots").glob("one-*"))
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


def assert_replays(schedule: Path, out: Path, workers: int) -> None:
    again = out.with_name(f"replay-{workers}")
    done = small.run(schedule, again, "--replay", out, nproc=workers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last(again) == last(out) and "has the same bits as" in done.stdout
    assert curve(again) == curve(out)


def curve(out: Path) -> dict[object, object]:
    """What was trained again after a kill counts as it was then."""
    return {event["iter"]: event["loss"] for event in events(out, "Iterated")}


def test_a_stopped_run_goes_on_and_all_of_it_is_replayed(schedule: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = small.start(schedule, out, nproc=3)
    wait_for(out, 5, run)
    run.process.send_signal(signal.SIGTERM)
    code, said = run.wait()
    assert code == 75, said
    stopped = events(out, "Stopped")[-1]["iter"]
    assert 5 <= stopped < ITERATIONS and run.gone()  # type: ignore[operator]
    done = small.run(schedule, out, nproc=2)
    assert done.returncode == 0, done.stdout
    assert_replays(schedule, out, 4)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank 0", "rank 1", "rank 2", "all"])
def test_a_killed_run_goes_on_from_its_newest_snapshot(what: str, schedule: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = small.start(schedule, out, nproc=3)
    wait_for(out, 30, run)
    victims = run.pids() if what == "all" else [run.ranks()[int(what[-1])]]
    processes.kill_all(victims)
    code, said = run.wait()
    assert code == (-signal.SIGKILL if what == "all" else 69), said
    assert run.gone(30)
    done = small.run(schedule, out, nproc=4)
    assert done.returncode == 0 and "iterations 20 to 60" in done.stdout, done.stdout
    assert_replays(schedule, out, 2)


@pytest.mark.slow
def test_a_replay_that_is_stopped_or_killed_goes_on(schedule: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert small.run(schedule, out, nproc=3).returncode == 0
    for number, code in ((signal.SIGTERM, 75), (signal.SIGKILL, 69)):
        run = small.start(schedule, again, "--replay", out, nproc=3)
        wait_for(again, len(events(again, "Iterated")) + 5, run)
        target = run.process.pid if number == signal.SIGTERM else run.ranks()[2]
        os.kill(target, number)
        found, said = run.wait()
        assert found == code and run.gone(30), said
    done = small.run(schedule, again, "--replay", out, nproc=2)
    assert done.returncode == 0 and last(again) == last(out), done.stdout


@pytest.mark.slow
def test_one_worker_trains_as_without_async(schedule: Path, tmp_path: Path) -> None:
    alone, plain = tmp_path / "alone", tmp_path / "plain"
    assert small.run(schedule, alone, nproc=1).returncode == 0
    (schedule / "one.prototxt").write_text(ONE.split("sync_param")[0].format(iterations=ITERATIONS))
    assert small.run(schedule, plain, nproc=1).returncode == 0
    with_record, without = last(alone), last(plain)
    del with_record["arrivals.safetensors"]
    assert with_record == without
