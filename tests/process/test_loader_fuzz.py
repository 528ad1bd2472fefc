"""loader: damaged records of all kinds give an image or a message with their key; `tests/reliability/fuzz_records.py` tries more of them."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "reliability" / "fuzz_records.py"


def test_five_hundred_damaged_records() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--count", "500"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "500 records" in done.stdout and " 0 failures" in done.stdout
