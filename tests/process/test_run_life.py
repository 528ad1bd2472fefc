"""The same command again: after the end, after an edit, after a signal, beside another run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import small


def straight(base: Path, nproc: int) -> Path:
    """The output of an uninterrupted run, made when it is first asked for; beside it a .txt of what the run printed."""
    out = base / f"straight{nproc}"
    if not out.with_suffix(".txt").exists():
        done = small.run(base / "schedule", out, nproc=nproc, code=0)
        out.with_suffix(".txt").write_text(done.stdout)
    return out


def mtimes(out: Path, *stages: str) -> dict[str, int]:
    """When the files of some stages' snapshots were written."""
    found = (p for p in (out / "snapshots").glob("*/*") if p.parent.name.split("-")[0] in stages)
    return {str(p): p.stat().st_mtime_ns for p in found}


@pytest.mark.smoke
def test_a_run_prints_its_plan_its_progress_and_its_results(base):
    lines = straight(base, 2).with_suffix(".txt").read_text().splitlines()
    assert lines[0].startswith("tiny: 4 stages, 17 iterations")
    assert any(line.startswith("stage 1/4 init  3/6  epoch 0.08  LR 0.08333") for line in lines)
    assert [line.split()[0] for line in lines[-6:]] == ["stage", "init", "cyc1", "collapse", "early", "total"]


def test_again_there_is_nothing_to_do_and_torch_is_not_loaded(base):
    out = straight(base, 1)
    before = mtimes(out, *small.STAGES)
    program = "import sys; from stagerun.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "run", str(base / "schedule"), "--out", str(out)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "nothing to do: every stage is done" and lines[-1] == "False"
    assert lines[1:-1] == straight(base, 1).with_suffix(".txt").read_text().splitlines()[-6:]
    assert mtimes(out, *small.STAGES) == before


@pytest.mark.parametrize(
    "nproc, number, whole_group",
    [
        pytest.param(1, signal.SIGTERM, False, id="1 TERM", marks=pytest.mark.slow),
        pytest.param(1, signal.SIGINT, False, id="1 INT", marks=pytest.mark.slow),
        pytest.param(2, signal.SIGTERM, False, id="2 TERM", marks=pytest.mark.smoke),
        pytest.param(2, signal.SIGUSR1, False, id="2 USR1", marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, True, id="2 ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_bits(base, tmp_path, nproc, number, whole_group):
    out = tmp_path / "out"
    first = small.start(base / "schedule", out, *small.ENDLESS, nproc=nproc)
    small.wait_for(out / "snapshots" / "init-00000002-a0001", first)
    paused = first.pids()
    for pid in paused:  # so that it is not over by the time that the other has started
        os.kill(pid, signal.SIGSTOP)
    other = small.run(base / "schedule", out)
    # At the keyboard the launcher's group gets it; its workers have sessions of their own, and it passes the signal on.
    # Sent while all stand still, or a busy machine might let the run end before.
    (os.killpg if whole_group else os.kill)(first.process.pid, number)
    for pid in [first.process.pid, *paused]:
        os.kill(pid, signal.SIGCONT)
    code, text = first.wait()
    assert code == 75, text
    assert first.gone()
    # A second run beside the first hears who holds the folder.
    assert other.returncode == 73 and f"another run holds {out}: process " in other.stderr
    message = next(line for line in text.splitlines() if line.startswith("stopped in"))
    assert "everything is saved: run the same command again to resume" in message
    assert "death signal" not in text, "torch's own words for it"
    stage, iter = message.split()[2], int(message.split()[5])
    assert (out / "snapshots" / f"{stage}-{iter:08d}-a0001").exists()

    second = small.run(base / "schedule", out, *small.AGAIN, nproc=nproc, code=0)
    # One that stopped at the very end of a stage has nothing to resume inside the next.
    lengths = {"init": 6, "cyc1": 5, "collapse": 3}
    assert "BIT-EXACT" in second.stdout or iter == lengths.get(stage, iter)
    assert processes.ends(out) == processes.ends(straight(base, nproc))


def test_a_closed_pipe_does_not_end_training(base, tmp_path):
    run = small.start(base / "schedule", tmp_path / "out")
    assert run.process.stdout is not None
    for _ in range(30):
        run.process.stdout.readline()
    run.process.stdout.close()  # `stagerun run ... | head`
    assert run.process.wait(timeout=300) == 0
    assert processes.ends(tmp_path / "out") == processes.ends(straight(base, 1))
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])["event"] == "RunFinished"


def test_stop_after_ends_as_a_signal_does(base, tmp_path):
    stopped = small.run(base / "schedule", tmp_path / "out", "--stop-after", "2s", *small.ENDLESS, nproc=2)
    assert stopped.returncode == 75 and "--stop-after 2 s: the time is up" in stopped.stderr, stopped.stderr
