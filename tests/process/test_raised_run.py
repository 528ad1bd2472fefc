"""`max_iter` raised: two workers go on from the old end, and are killed in it; its proofs are one chain."""

import random
from pathlib import Path

import processes
import pytest
import small
import tiny
from test_raised import MAIN, ends
from test_run_trees import ALONE, command, make_schedule


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("raised")
    tiny.make_data(base / "data")
    return base / "data"


@pytest.mark.parametrize("determinism", ["FIXED", "ELASTIC"])
def test_two_workers_are_killed_after_the_raise(data: Path, tmp_path: Path, determinism: str) -> None:
    def written(folder: Path, length: int) -> Path:
        made = make_schedule(
            folder, data, MAIN, main=f'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: {length}\n'
        )
        file = made / "schedule.prototxt"
        file.write_text(f"determinism: {determinism}\n" + file.read_text())
        return made

    straight, schedule, out = written(tmp_path / "long", 30), written(tmp_path / "s", 5), tmp_path / "out"
    for folder, where in ((straight, tmp_path / "whole"), (schedule, out)):
        done = small.run(folder, where, nproc=2)
        assert done.returncode == 0, done.stdout + done.stderr
    written(schedule, 30)
    killed = small.start(schedule, out, nproc=2)
    assert killed.process.stdout is not None
    assert any(line.startswith("stage 1/1 main: iterations 5 to 30") for line in killed.process.stdout)
    processes.kill(killed, "all", random.Random(1))
    killed.wait()
    head = next(line for line in command("report", out).splitlines() if line.startswith("| stage "))
    assert "top-1" not in head, "what the old end came to is not the stage's result"
    done = small.run(schedule, out, nproc=1 if determinism == "ELASTIC" else 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ends(out, "main")[-1].id == ends(tmp_path / "whole", "main")[-1].id


def test_the_proofs_are_one_chain(data: Path, tmp_path: Path) -> None:
    schedule, out = tmp_path / "s", tmp_path / "out"
    for length in (5, 12):
        written = f'base_lr: 0.05 lr_policy: "fixed" max_iter: {length} snapshot: 4 audit_param {{ proof_iter: 3 }}\n'
        make_schedule(schedule, data, MAIN, main=written)
        command("run", schedule, "--out", out, *ALONE)
    assert "BIT-EXACT" in command("verify", schedule, "--out", out, *ALONE)
