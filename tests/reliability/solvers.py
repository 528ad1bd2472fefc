"""Each trial puts 200 folders of mutated solver files through check, plan and lint (fuzz_solvers.py): every one must give a
schedule, or mistakes of which each stands at a line and column of a file. Anything else is a failure: a traceback, a mistake without its
place, more than 2 GB of memory or 20 s for a folder.
"""

import contextlib
import io
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from reliability.trial import Scenario, Trial

FOLDERS = 200  # in a trial
HERE = Path(__file__).parent


def tried(seed: int, folders: int = FOLDERS) -> Trial:
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))
    import fuzz_children

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        counts, failures = fuzz_children.try_all(str(HERE / "fuzz_solvers.py"), "folder", seed, 0, folders, folders)
    words = Counter(
        {"schedules": counts["schedule"], "with mistakes": counts["parsed"] + counts["mistakes"], "failures": failures}
    )
    return Trial(folders, words, wrong=said.getvalue().strip())


def trials(rng: random.Random, folder: Path) -> Iterator[Trial]:
    while True:
        yield tried(rng.randrange(2**32))


SCENARIO = Scenario(
    name="solvers",
    fault="mutated solver files",
    aim="0 tracebacks, every mistake with its place",
    wanted=100_000,
    trials=trials,
)
