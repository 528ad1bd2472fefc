"""The same command again: after the end, after an edit, after a signal, beside another run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import small
from facade import duration


def straight(base: Path, nproc: int) -> Path:
    """The output of an uninterrupted run, made when it is first asked for; beside it a .txt of what the run printed."""
    out = base / f"straight{nproc}"
    if not out.with_suffix(".txt").exists():
        done = small.run(base / "schedule", out, nproc=nproc)
        assert done.returncode == 0, done.stdout + done.stderr
        out.with_suffix(".txt").write_text(done.stdout)
    return out


def mtimes(out: Path, *stages: str) -> dict[str, int]:
    """When the files of some stages' snapshots were written."""
    found = (p for p in (out / "snapshots").glob("*/*") if p.parent.name.split("-")[0] in stages)
    return {str(p): p.stat().st_mtime_ns for p in found}


@pytest.mark.smoke
def test_a_run_prints_its_plan_its_progress_and_its_results(base: Path) -> None:
    lines = straight(base, 2).with_suffix(".txt").read_text().splitlines()
    assert lines[0].startswith("tiny: 4 stages, 17 iterations")
    assert any(line.startswith("stage 1/4 init  3/6  epoch 0.08  LR 0.08333") for line in lines)
    assert [line.split()[0] for line in lines[-6:]] == ["stage", "init", "cyc1", "collapse", "early", "total"]


def test_again_there_is_nothing_to_do_and_torch_is_not_loaded(base: Path) -> None:
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


def test_an_edited_stage_is_refused_then_redone_with_what_follows_from_it(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(straight(base, 1), out)
    changed = small.STAGES["cyc1"].replace("0.06", "0.05")
    schedule = small.make_schedule(tmp_path / "schedule", base / "data", cyc1=changed)

    refused = small.run(schedule, out)
    assert refused.returncode == 78
    assert f"base_lr 0.06 -> 0.05 ({schedule}/cyc1.prototxt:1)" in refused.stderr
    assert "stage `collapse` is stale: its parent `cyc1` is stale" in refused.stderr
    assert "early" not in refused.stderr and "--redo cyc1" in refused.stderr
    assert processes.ends(out) == processes.ends(straight(base, 1))

    elders = mtimes(out, "init", "early")
    redone = small.run(schedule, out, "--redo", "cyc1")
    assert redone.returncode == 0, redone.stdout + redone.stderr
    assert mtimes(out, "init", "early") == elders
    assert "stage 2/4 cyc1" in redone.stdout and "stage 3/4 collapse" in redone.stdout
    assert "stage 1/4 init" not in redone.stdout and "stage 4/4 early" not in redone.stdout
    assert any((out / "snapshots").glob("cyc1-00000005-a0002"))
    assert any((out / "snapshots").glob("cyc1-00000005-a0001")), "what was trained before is the user's to delete"
    again = small.run(schedule, out, "--redo", "cyc1")
    assert again.returncode == 0
    assert again.stdout.splitlines()[:2] == [
        "note: stage `cyc1` is not stale, so --redo has nothing to do there",
        "nothing to do: every stage is done",
    ]


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
def test_a_signal_saves_and_the_same_command_goes_on_to_the_same_bits(
    base: Path, tmp_path: Path, nproc: int, number: signal.Signals, whole_group: bool
) -> None:
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
    assert "everything is saved: run the same command again to go on" in message
    assert "death signal" not in text, "torch's own words for it"
    stage, iter = message.split()[2], int(message.split()[5])
    assert (out / "snapshots" / f"{stage}-{iter:08d}-a0001").exists()

    second = small.run(base / "schedule", out, *small.AGAIN, nproc=nproc)
    assert second.returncode == 0, second.stdout + second.stderr
    # One that stopped at the very end of a stage has nothing to resume inside the next.
    lengths = {"init": 6, "cyc1": 5, "collapse": 3}
    assert "BIT-EXACT" in second.stdout or iter == lengths.get(stage, iter)
    assert processes.ends(out) == processes.ends(straight(base, nproc))


@pytest.mark.parametrize(
    "lines_read", [pytest.param(0, marks=pytest.mark.slow), 30]
)  # closed before the plan is printed, and in the midst of training
def test_a_closed_pipe_does_not_end_training(base: Path, tmp_path: Path, lines_read: int) -> None:
    run = small.start(base / "schedule", tmp_path / "out")
    assert run.process.stdout is not None
    for _ in range(lines_read):
        run.process.stdout.readline()
    run.process.stdout.close()  # `stagerun run ... | head`
    assert run.process.wait(timeout=300) == 0
    assert processes.ends(tmp_path / "out") == processes.ends(straight(base, 1))
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])["event"] == "RunFinished"


def test_damage_scratch_and_a_torn_log_in_one_life(base: Path, tmp_path: Path) -> None:
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    shutil.copytree(straight(base, 1), out)
    for name in ("cyc1-00000005-a0001", "collapse-00000002-a0001", "collapse-00000003-a0001", "early-00000003-a0001"):
        path = out / "snapshots" / name / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    log = out / "log.jsonl"
    log.write_text(log.read_text() + '{"time": 1, "event": "Iter')
    # Only what will be read is verified; a cut file shows at once, and makes a stage go back.
    for name in ("cyc1-00000005-a0001", "collapse-00000003-a0001"):
        (out / "snapshots" / name / "MANIFEST.json").write_text("{}")
    planned = small.stagerun("plan", base / "schedule", "--out", out)
    assert "note: snapshot cyc1-00000005-a0001 is damaged and is passed over" in planned.stdout
    done = small.run(base / "schedule", out, "--set", f'data.scratch="{scratch}"')
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cyc1: iterations 4 to 5" in done.stdout
    assert "warning: snapshot cyc1-00000005-a0001 is damaged and is passed over" in done.stdout
    assert "warning: snapshot collapse-00000002-a0001 is damaged and was set aside" in done.stdout
    assert "collapse: iterations 0 to 3, batch 16, from cyc1-00000005-a0002" in done.stdout
    assert (out / "snapshots" / ".bad-collapse-00000002-a0001").exists()
    ends = processes.ends(straight(base, 1))
    assert ends_of_attempt(out, 2) == {k: ends[k] for k in ("cyc1", "collapse")}

    lines = log.read_text().splitlines()
    torn = lines.index('{"time": 1, "event": "Iter')
    assert all(json.loads(line) for i, line in enumerate(lines) if i != torn) and torn < len(lines) - 5
    copies = list(scratch.glob("stagerun-*/*/data.mdb"))
    assert len(copies) == 2, "train and val, each once"


def ends_of_attempt(out: Path, attempt: int) -> dict[str, str]:
    """`processes.ends` of one process life's snapshots."""
    view = out.parent / f"attempt{attempt}"
    (view / "snapshots").mkdir(parents=True)
    for path in (out / "snapshots").glob(f"[a-z]*-a{attempt:04d}"):
        (view / "snapshots" / path.name).symlink_to(path)
    return processes.ends(view)


def test_stop_after_ends_as_a_signal_does_and_the_command_goes_on_to_the_same_bits(base: Path, tmp_path: Path) -> None:
    schedule, log = base / "schedule", Path()
    for time in (15, 50, 250):
        out = tmp_path / str(time)
        stopped = small.run(schedule, out, "--stop-after", f"{time}s", *small.ENDLESS, nproc=2)
        text = stopped.stdout + stopped.stderr
        assert stopped.returncode == 75, text
        log = out / "log.jsonl"
        if log.exists() and '"Iterated"' in log.read_text():  # on a busy machine it has not begun so soon
            break
    assert f"--stop-after {duration(time)}: the time is up" in text and text.count("SIGTERM: stopping ") == 1
    assert [e["event"] for e in map(json.loads, log.read_text().splitlines())][-1] == "Stopped"
    assert small.run(schedule, out, *small.AGAIN, nproc=2).returncode == 0
    # The stop may have come in the stage without an end: what that one saved is left beside what was trained again.
    assert processes.content(straight(base, 2)).items() <= processes.content(out).items()
