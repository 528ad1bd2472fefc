"""Without a wing's folder a working product is left, and what needs the wing is refused with its place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from nan_help import make_schedule

import stagerun

NEED_WIRE = (
    "compress_param { method: TOP_K }",
    "sync_param { method: LOCAL replicas: 2 period: 2 }",
    "sync_param { method: ASYNC replicas: 2 max_staleness: 2 }",
)
# An editable installation would find the folder in this tree.
UNINSTALLED = "import sys; sys.meta_path = [it for it in sys.meta_path if 'editable' not in it.__module__]"


def test_without_wire_dense_stages_train_and_its_fields_are_refused(tmp_path, few):
    package, out = Path(stagerun.__file__).parent, tmp_path / "out"
    shutil.copytree(package, tmp_path / "stagerun", ignore=shutil.ignore_patterns("wire", "__pycache__"))

    (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)

    def command(*words: object) -> tuple[int, str]:
        called = [sys.executable, "-m", "stagerun", *map(str, words)]
        alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(called, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout + done.stderr

    dense = make_schedule(tmp_path / "dense", few, main="max_iter: 2")
    assert "no mistakes" in command("check", dense)[1] and "2 to do" in command("plan", dense, "--out", out)[1]
    assert command("run", dense, "--out", out, "--nproc", 1)[0] == 0
    assert (out / "snapshots/main-00000002-a0001/model.safetensors").exists()
    code, said = command("run", dense, "--out", tmp_path / "new", "--replay", out)
    assert code == 64 and "lacks stagerun/wire" in said
    stages = {f"s{i}": f"max_iter: 2\n{field}" for i, field in enumerate(NEED_WIRE)}
    code, said = command("check", make_schedule(tmp_path / "all", few, **stages))
    assert code == 64 and said.count("lacks stagerun/wire") == len(NEED_WIRE)
    for stage, field in zip(stages, NEED_WIRE, strict=True):
        assert f"{stage}.prototxt:2:1: stage `{stage}` has `{field.split()[0]}`, and this installation lacks" in said
