"""The committed code is what scripts/dev proto makes of protos/."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_generated_files_are_up_to_date(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed, which generates them")
    script = [str(ROOT / "scripts" / "dev"), "proto", str(tmp_path)]
    subprocess.run(script, check=True, cwd=tmp_path, env={**os.environ, "PYTHON": sys.executable})
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    code = {f"{n}_pb2.{e}" for n in ("stagerun", "caffe", "tfexample") for e in ("py", "pyi")}
    assert made.keys() == code | {"comments.json", "enums_pb2.py"}
    for name, content in made.items():
        (committed,) = (ROOT / "stagerun").rglob(name)
        assert committed.read_bytes() == content, f"run scripts/dev proto: {name} is out of date"
