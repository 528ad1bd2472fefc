"""What commands for a login node load: they answer in a fraction of a second, so nothing heavy."""

import json
import subprocess
import sys
from pathlib import Path

SCHEDULE = str(Path(__file__).parents[2] / "solvers" / "resnet50_72ep")
ALLOWED = {"click", "google", "msgspec", "psutil", "stagerun", "typing_extensions"}
# One process runs them all: what one of them loads is there from then on.
PROGRAM = """
import json, sys
from click.testing import CliRunner

def loaded():
    return sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))

before = set(sys.modules)  # an editable install, coverage and the like load modules of their own at start
import stagerun
print(json.dumps(["import stagerun", 0, sorted(name for name in set(sys.modules) - before if name.startswith("stagerun.")) or loaded(), ""]))
schedule = stagerun.load(sys.argv[1])
repr(stagerun.plan(schedule)), str(stagerun.plan(sys.argv[1]))
print(json.dumps(["stagerun.plan", 0, loaded(), ""]))
from stagerun.cli import main
for words in sys.argv[2:]:
    done = CliRunner().invoke(main, [word.replace("DIR", sys.argv[1]) for word in words.split()])
    print(json.dumps([words, done.exit_code, loaded(), done.stderr]))
"""
LIGHT = (
    "check DIR", "plan DIR", "plan DIR --json", "plan DIR --images-per-second 6303 --budget 4h", "plan DIR --why cyc2.max_iter",
    "diff DIR DIR", "help", "help base_lr", "help designing", "run --help", "status DIR", "status --snapshots DIR", "eval --help",
    "export --help",
)  # fmt: skip


def test_only_light_modules_are_loaded_and_run_finds_missing_images_without_torch(tmp_path):
    words = [sys.executable, "-c", PROGRAM, SCHEDULE, *LIGHT, "run DIR"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    alone, planned, *light, run = map(json.loads, done.stdout.splitlines())
    assert alone[2] == ["stagerun"], "import stagerun loads nothing"
    assert len(light) == len(LIGHT)
    assert [(name, code) for name, code, roots, _ in (planned, *light) if code or not set(roots) <= ALLOWED] == []
    _, code, roots, said = run
    assert code == 65 and "ilsvrc12_train_lmdb: no such folder" in said and "torch" not in roots
