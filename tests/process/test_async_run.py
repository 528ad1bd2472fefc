"""`stagerun run` with `sync_param { method: ASYNC }`: workers that are killed or stopped, runs that go on, and replays of all of it by
other numbers of workers, to the same bits."""

import signal
from pathlib import Path

import processes
import pytest
import small
import tiny
from processes import events, until

ITERATIONS = 40
SCHEDULE = """
name: "async" keep_snapshots: 9
model {{ name: "resnet_small" num_classes: 10 channels: 1 }}
data {{ train {{ source: "{data}/train_lmdb" images: 600 }} val {{ source: "{data}/val_lmdb" images: 100 }} }}
solver {{
  batch_size: 8 device_batch_size: 4 momentum: 0.9 weight_decay: 5e-4
  transform_param {{ pad: 2 mirror: true crop_size: 20 mean_value: 73 scale: 0.0111 }}
  snapshot: 20 display: 10 test_batch_size: 50 test_iter: 1
}}
stage {{ name: "one" solver_param {{
  base_lr: 0.01 lr_policy: "fixed" max_iter: {iterations} sync_param {{ method: ASYNC replicas: 4 max_staleness: 4 }}
}} }}
"""


@pytest.fixture(scope="module")
def schedule(tmp_path_factory):
    folder = tmp_path_factory.mktemp("async")
    tiny.make_data(folder)
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(data=folder, iterations=ITERATIONS))
    return folder


def last(out: Path) -> dict[str, bytes]:
    """The files of the newest snapshot: weights, momentum, record."""
    newest = max((out / "snapshots").glob("one-*"))
    return {file.name: file.read_bytes() for file in newest.glob("*.safetensors")}


@pytest.mark.parametrize(
    "whom", ["command", *(pytest.param(one, marks=pytest.mark.slow) for one in ("rank 0", "rank 1", "rank 2", "all"))]
)
def test_a_run_that_was_stopped_or_killed_goes_on_and_all_of_it_is_replayed(whom, schedule, tmp_path):
    """The command is asked to stop; the others are killed."""
    out = tmp_path / "out"
    run = small.start(schedule, out, nproc=3)
    until(run, lambda: len(events(out, "Iterated")) >= (5 if whom == "command" else 22))
    if whom == "command":
        run.process.send_signal(signal.SIGTERM)
    else:
        processes.kill_all(run.pids() if whom == "all" else [run.ranks()[int(whom[-1])]])
    code, said = run.wait()
    assert code == {"command": 75, "all": -signal.SIGKILL}.get(whom, 69), said
    assert run.gone(30)
    first = events(out, "Stopped")[-1]["iter"] if whom == "command" else 20
    assert 5 <= first < ITERATIONS
    done = small.run(schedule, out, nproc=2)
    assert done.returncode == 0 and f"iterations {first} to {ITERATIONS}" in done.stdout, done.stdout
    # What was trained again after a kill counts as it was then.
    again = tmp_path / "replay"
    done = small.run(schedule, again, "--replay", out, code=0)
    assert last(again) == last(out) and "has the same bits as" in done.stdout
    losses, its = ({e["iter"]: e["loss"] for e in events(each, "Iterated")} for each in (out, again))
    assert losses == its
