"""`compile: true`: the same training, as far as other arithmetic can be the same, and a clear word where nothing compiles."""

import os
from pathlib import Path

import pytest
import small

COMPILED = ("--set", "solver.compile=true")
CACHE = f"stagerun-compiled-{os.getuid()}"


def environment(temporary: Path, **more: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    return {**known, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), **more}


@pytest.mark.slow
def test_a_compiled_run_trains_like_the_other_and_is_resumed(base, tmp_path):
    plain = small.run(base / "schedule", tmp_path / "plain")
    compiled = small.run(
        base / "schedule", tmp_path / "compiled", *COMPILED, env=environment(tmp_path), timeout=400, code=0
    )
    assert (tmp_path / CACHE).stat().st_mode & 0o777 == 0o700

    def first_losses(text: str) -> list[float]:
        lines = [line for line in text.splitlines() if line.startswith("stage 1/4 init  ")]
        return [float(line.split("loss ")[1].split()[0]) for line in lines]

    assert first_losses(compiled.stdout) == pytest.approx(first_losses(plain.stdout), abs=2e-3)
    again = small.run(base / "schedule", tmp_path / "compiled")
    assert again.returncode == 78 and "compile true -> false" in again.stderr


@pytest.mark.slow
def test_without_a_compiler_it_says_so(base, tmp_path):
    without = environment(tmp_path, CXX="/no/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    done = small.run(base / "schedule", tmp_path / "out", *COMPILED, env=without, timeout=400, code=64)
    assert "torch.compile can't make the network's code" in done.stderr and "leave `compile` out" in done.stderr


def test_compiled_code_is_not_taken_from_where_others_may_write(base, tmp_path):
    folder = tmp_path / CACHE
    folder.mkdir()
    folder.chmod(0o777)
    wide = small.run(base / "schedule", tmp_path / "out", *COMPILED, env=environment(tmp_path))
    folder.rmdir()
    folder.symlink_to(tmp_path)
    link = small.run(base / "schedule", tmp_path / "out", *COMPILED, env=environment(tmp_path))
    for done, said in ((wide, "others may write to it (mode 0777), so its"), (link, "or is not a folder")):
        assert done.returncode == 77 and said in done.stderr, done.stderr
    assert "hint: remove it, or set TORCHINDUCTOR_CACHE_DIR" in link.stderr
