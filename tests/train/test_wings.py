"""Without the wings' folders a working product is left, and what needs a wing is refused with its place."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nan_help import make_schedule

import stagerun

# By the wing's folder: fields that need it, and commands that do.
NEED = {
    "wire": (
        (
            "compress_param { method: TOP_K }",
            "sync_param { method: LOCAL replicas: 2 period: 2 }",
            "sync_param { method: ASYNC replicas: 2 max_staleness: 2 }",
        ),
        ("run dense --out new --replay out",),
    ),
    "caffe": (
        ('net: "lenet.prototxt"', 'model { caffe_net: "lenet.prototxt" }'),
        (
            "plan --net lenet",
            "import caffe dense --out new",
            "plan weights --weights",
            "export out/snapshots/main-00000002-a0001 m.caffemodel",
        ),
    ),
    "look": ((), ("view dense", "plan dense --plot x.svg")),
}
# An editable installation would find the folder in this tree.
UNINSTALLED = "import sys; sys.meta_path = [it for it in sys.meta_path if 'editable' not in it.__module__]"


@pytest.mark.process
def test_without_the_wings_dense_stages_train_and_their_fields_are_refused(tmp_path, few):
    package = Path(stagerun.__file__).parent
    shutil.copytree(package, tmp_path / "stagerun", ignore=shutil.ignore_patterns(*NEED, "__pycache__"))
    (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)

    def command(*words: object) -> tuple[int, str]:
        called = [sys.executable, "-m", "stagerun", *map(str, words)]
        alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(called, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout + done.stderr

    dense, out = make_schedule(tmp_path / "dense", few, main="max_iter: 2"), tmp_path / "out"
    assert "no mistakes" in command("check", dense)[1] and "2 to do" in command("plan", dense, "--out", out)[1]
    assert command("run", dense, "--out", out, "--nproc", 1)[0] == 0
    assert (out / "snapshots/main-00000002-a0001/model.safetensors").exists()
    (tmp_path / "w.caffemodel").write_bytes(b"\n\x01x")
    make_schedule(tmp_path / "weights", few, main='max_iter: 2 weights { file: "../w.caffemodel" }')
    stages = {}
    for wing, (fields, commands) in NEED.items():
        for words in commands:
            code, said = command(*words.split())
            assert code == 64 and f"lacks stagerun/{wing}" in said, (words, said)
        stages |= {f"{wing}{i}": f"max_iter: 2\n{field}" for i, field in enumerate(fields)}
    code, said = command("check", make_schedule(tmp_path / "all", few, **stages))
    assert code == 64 and said.count("hint:") == len(stages)
    for wing, (fields, _) in NEED.items():
        assert said.count(f"lacks stagerun/{wing}") == len(fields)
    for stage in stages:
        assert f"{stage}.prototxt:2:" in said
