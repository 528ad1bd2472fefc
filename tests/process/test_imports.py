"""What commands for a login node load: they answer in a fraction of a second, so nothing heavy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCHEDULE = str(Path(__file__).parents[2] / "solvers" / "resnet50_72ep")
ALLOWED = {"click", "google", "stagerun"}

PROGRAM = """
import json, sys
before = set(sys.modules)  # an editable install, coverage and the like load modules of their own at start
from stagerun.cli import main
try:
    main(sys.argv[1:])
finally:
    roots = {name.partition(".")[0] for name in set(sys.modules) - before}
    print("\\n" + json.dumps(sorted(roots - set(sys.stdlib_module_names))))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", SCHEDULE],
        ["plan", SCHEDULE],
        ["plan", SCHEDULE, "--json"],
        ["plan", SCHEDULE, "--images-per-second", "6303", "--budget", "4h"],
        ["plan", SCHEDULE, "--why", "cyc2.max_iter"],
        ["diff", SCHEDULE, SCHEDULE],
        ["help"],
        ["help", "base_lr"],
        ["help", "designing"],
        ["run", "--help"],
        ["status", SCHEDULE],
        ["status", "--snapshots", SCHEDULE],
        ["eval", "--help"],
        ["export", "--help"],
    ],
    ids=" ".join,
)
def test_only_light_modules_are_loaded(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) <= ALLOWED


def test_run_finds_missing_images_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", SCHEDULE], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 65 and "ilsvrc12_train_lmdb: no such folder" in done.stderr
    assert "torch" not in json.loads(done.stdout.splitlines()[-1])


LIBRARY = """
import json, sys
before = set(sys.modules)
import stagerun
found = [sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names)]
schedule = stagerun.load(sys.argv[1])
repr(stagerun.plan(schedule)), str(stagerun.plan(sys.argv[1]))
found.append(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
print(json.dumps(found))
"""


def test_import_stagerun_loads_nothing_and_a_plan_neither_torch_nor_numpy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY, SCHEDULE], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    alone, planned = json.loads(done.stdout)
    assert alone == ["stagerun"] and set(planned) <= ALLOWED
