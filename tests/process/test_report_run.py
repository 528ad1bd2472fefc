"""`stagerun report` of a real run, and what it loads."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small
import tiny
from made_up_runs import rows
from test_report_formats import three as three


def test_tables_need_no_torch(three: list[Path]) -> None:
    program = (
        "import sys; from stagerun.cli import main\n"
        "try: main()\nfinally: print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "report", *map(str, three)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The output folder of a run that was stopped once in its last stage, and what the last command printed."""
    base = tmp_path_factory.mktemp("report")
    tiny.make_data(base / "data")
    schedule = small.make_schedule(base / "schedule", base / "data")
    out = base / "out"
    first = small.start(schedule, out, *small.ENDLESS)
    small.wait_for(out / "snapshots" / "collapse-00000003-a0001", first)
    os.kill(first.process.pid, signal.SIGTERM)
    code, text = first.wait()
    assert code == 75, text
    done = small.run(schedule, out, *small.AGAIN)
    assert done.returncode == 0, done.stderr
    yield out, done.stdout


def test_the_report_of_a_real_run_agrees_with_what_it_printed(real: tuple[Path, str]) -> None:
    out, printed = real
    table = {line.split()[0]: line for line in printed.splitlines()[-5:]}
    found = rows(out)
    assert [row["stage"] for row in found] == list(small.STAGES)
    for row in found:
        assert f"{100 * float(row['top1']):.2f} %" in table[row["stage"]]
        assert f"{float(row['loss']):.4f}" in table[row["stage"]]
    assert {row["stage"]: row["from"] for row in found} == {
        "init": "seed", "cyc1": "init", "collapse": "cyc1", "early": "init",
    }  # fmt: skip
    assert rows(out, "--by", "run")[0]["state"] == "finished"
    lives = rows(out, "--by", "life")
    assert len(lives) == 2 and lives[0]["end"].startswith("stopped")
    assert sum(int(life["iterations"]) - int(life["done_again"]) for life in lives) == 17
