"""python tests/reliability: see driver.py."""

import sys
from pathlib import Path

# What is imported is the folder above: this one is a package in it.
TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS / "help")]

if __name__ == "__main__":
    try:
        from reliability.driver import main
    except KeyboardInterrupt:  # torch is among what it imports, which takes seconds
        sys.exit(130)
    sys.exit(main())
