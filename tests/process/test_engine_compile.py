"""`compile: true`: the same training, as far as other arithmetic can be the same, and a clear word where nothing compiles."""

import os
from pathlib import Path

import pytest
import small

pytestmark = pytest.mark.slow  # a compiler takes its time

COMPILED = ("--set", "solver.compile=true")


@pytest.fixture(scope="module")
def schedule(base: Path) -> Path:
    return base / "schedule"


def test_a_compiled_run_trains_like_the_other_and_is_resumed(schedule: Path, tmp_path: Path) -> None:
    plain = small.run(schedule, tmp_path / "plain")
    compiled = small.run(schedule, tmp_path / "compiled", *COMPILED, timeout=400)
    assert compiled.returncode == 0, compiled.stderr

    def first_losses(text: str) -> list[float]:
        lines = [line for line in text.splitlines() if line.startswith("stage 1/4 init  ")]
        return [float(line.split("loss ")[1].split()[0]) for line in lines]

    assert first_losses(compiled.stdout) == pytest.approx(first_losses(plain.stdout), abs=2e-3)
    again = small.run(schedule, tmp_path / "compiled")
    assert again.returncode == 78 and "compile true -> false" in again.stderr


def test_without_a_compiler_it_says_so(schedule: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")
    }  # fmt: skip
    done = small.run(schedule, tmp_path / "out", *COMPILED, env=environment, timeout=400)
    assert done.returncode == 64, done.stdout + done.stderr
    assert "torch.compile can't make the network's code" in done.stderr and "leave `compile` out" in done.stderr
