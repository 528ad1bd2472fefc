"""What `method: AUTO` chose in a whole run of two workers. Other runs with `compress_param`: tests/train/test_compressed.py, test_choosing.py."""

import json
import os
import signal
from pathlib import Path

import small


def test_what_auto_chose_before_it_was_killed_is_kept(base: Path, tmp_path: Path) -> None:
    """Killed right after the choice, before any update: two workers then train by it, whatever the link is like by then."""
    schedule, out, chosen = base / "schedule", tmp_path / "out", {"*": "TOP_K"}
    how = ("--set", "solver.compress_param={method: AUTO ratio: 0.1 allow: TOP_K}")
    run = small.start(schedule, out, *how, *small.ENDLESS, nproc=2)
    small.wait_for(out / "choices" / "init.json", run)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait()[0] == -signal.SIGKILL and run.gone(30)
    path = out / "choices" / "init.json"
    record = json.loads(path.read_text())
    assert record["workers"] == 2 and record["seconds"]
    first = not list((out / "snapshots").glob("init-*"))
    if first:
        path.write_text(json.dumps({**record, "choice": chosen}))
    done = small.run(schedule, out, *how, *small.AGAIN, "--until", "init", nproc=2)
    assert done.returncode == 0, done.stdout + done.stderr
    chosen = chosen if first else record["choice"]
    assert "as chosen before, in OUT/choices" in done.stdout or not first
    ends = list((out / "snapshots").glob("init-00000006-*"))
    assert [json.loads((end / "state.json").read_text())["choice"] for end in ends] == [chosen]
    assert json.loads(path.read_text())["choice"] == chosen
    shown = small.stagerun("plan", schedule, "--out", out, *how).stdout
    assert "`init`: AUTO chose for 2 workers: TOP_K" in shown or not first
