"""Damaged folders of Caffe's: a schedule comes out of them, or mistakes with their places; never anything else."""

import os
import random
import re
from collections.abc import Mapping
from pathlib import Path

from drawn import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from stagerun.base.errors import RecipeError, StagerunError
from stagerun.tools.caffe.convert import Wanted, convert
from stagerun.tools.caffe.disk import CaffeFolder
from stagerun.tools.caffe.write import check_lines, folder_lines

FOLDERS = Path(__file__).parents[1] / "golden" / "caffe_import"
# Folders without a large net, as file names and bytes.
SEEDS: list[dict[str, bytes]] = [
    {p.name: p.read_bytes() for p in (FOLDERS / name).iterdir() if p.is_file()}
    for name in ("branches", "fine_tuning", "mistakes", "old_net", "resumed")
]
WORDS = sorted({w for seed in SEEDS for data in seed.values() for w in re.findall(r"[\w.:{}\"/-]+", data.decode())})
ODD = ["", "[]", "{", "}", "<", '"', "'", "#", "\0", "\x85", "\r", "\t", "-1", "0", "1e999", "nan", "9" * 30, "%s", "é"]


class Held(CaffeFolder):
    """A folder that is held in memory."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(os.curdir, None, lambda path: None)
        self.files = files

    def prototxts(self) -> dict[str, bytes]:
        return {n: d for n, d in self.files.items() if n.endswith(".prototxt")}

    def scripts(self) -> dict[str, bytes]:
        return {n: d for n, d in self.files.items() if not n.endswith((".prototxt", ".txt"))}

    def net(self, path: str) -> tuple[str, bytes] | None:
        return (path, self.files[path]) if path in self.files else None

    def mean_file(self, path: str) -> bytes | None:
        return self.files.get(path)

    def images(self, path: str, is_list: bool) -> tuple[str, int, int | None] | None:
        return None


def damaged(files: Mapping[str, bytes], random: random.Random) -> dict[str, bytes]:
    """A few words of a few files taken out, doubled, moved, or replaced by others."""
    result = dict(files)
    for _ in range(random.randint(1, 6)):
        name = random.choice(sorted(result))
        words = re.split(r"(\s+)", result[name].decode(errors="replace"))
        at = random.randrange(len(words))
        change = random.randrange(6)
        if change == 0:
            del words[at]
        elif change == 1:
            words.insert(at, random.choice(words))
        elif change == 2:
            words[at] = random.choice(WORDS)
        elif change == 3:
            words[at] = random.choice(ODD)
        elif change == 4:
            words[at] = words[at][: random.randint(0, len(words[at]))] + random.choice(ODD)
        else:
            words = words[at:] + words[:at]
        result[name] = "".join(words).encode(errors="replace")
    return result


def imported(files: Mapping[str, bytes], order: tuple[str, ...], nets: bool = True) -> None:
    """AssertionError for a mistake without a place; whatever is no StagerunError goes through."""
    try:
        converted = convert(Held(files), Wanted(order=order, images=1000, workers=len(order) or None, nets=nets))
        lines = folder_lines(converted, "fuzz", "caffe")
        problems = check_lines(lines, converted.written, converted.found, "/fuzz", "fuzz")
    except RecipeError as error:
        problems = error.problems
        assert problems
    except StagerunError as error:
        assert error.message
        return
    for problem in problems:
        assert problem.span.path and problem.span.line >= 1 and problem.span.column >= 1, problem
        assert problem.render()


@examples(150, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32), st.sampled_from([(), (), ("main",), ("collapse", "main"), ("main", "drop")]), st.booleans()
)
def test_damaged_folders(seed: int, order: tuple[str, ...], nets: bool) -> None:
    chance = random.Random(seed)
    imported(damaged(chance.choice(SEEDS), chance), order, nets)


@examples(50)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes(solver: bytes, script: bytes) -> None:
    net = SEEDS[0]["net.prototxt"]
    imported({"solver.prototxt": b'net: "net.prototxt" base_lr: 1 ' + solver, "a.sh": script, "net.prototxt": net}, ())
