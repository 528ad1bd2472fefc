"""Damaged folders of Caffe's: a schedule comes out of them, or mistakes with their places; never anything else."""

import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import contract
from drawn import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

# Folders as file names and bytes.
CASES = [
    contract.Case.read(path) for path in sorted(contract.CASES.glob("caffe_folder_*.txt")) if "lenet" not in path.stem
]
SEEDS = [{Path(name).name: text.encode() for name, text in case.files.items()} for case in CASES]
WORDS = sorted({w for seed in SEEDS for data in seed.values() for w in re.findall(r"[\w.:{}\"/-]+", data.decode())})
ODD = ["", "[]", "{", "}", "<", '"', "'", "#", "\0", "\x85", "\r", "\t", "-1", "0", "1e999", "nan", "9" * 30, "%s", "é"]


def damaged(files: Mapping[str, bytes], random: random.Random) -> dict[str, bytes]:
    """A few words of a few files taken out, doubled, moved, or replaced by others."""
    result = dict(files)
    for _ in range(random.randint(1, 6)):
        name = random.choice(sorted(result))
        words = re.split(r"(\s+)", result[name].decode(errors="replace"))
        at = random.randrange(len(words))
        changes = {
            0: words[:at] + words[at + 1 :],
            1: [*words[:at], random.choice(words), *words[at:]],
            2: [*words[:at], random.choice(WORDS), *words[at + 1 :]],
            3: [*words[:at], random.choice(ODD), *words[at + 1 :]],
            4: [*words[:at], words[at][: random.randint(0, len(words[at]))] + random.choice(ODD), *words[at + 1 :]],
            5: words[at:] + words[:at],
        }
        result[name] = "".join(changes[random.randrange(6)]).encode(errors="replace")
    return result


def imported(files: Mapping[str, bytes], *words: str) -> None:
    with tempfile.TemporaryDirectory() as held:
        for name, data in files.items():
            (Path(held) / name).write_bytes(data)
        done = contract.stagerun(["import", "caffe", ".", "--out", "out", "--images", "1000", *words], Path(held))
    assert done.exit_code in (0, 64, 65), done.output
    if done.exit_code == 64 and "mistake" in done.output:
        assert re.search(r"^\S.*:\d+:\d+: ", done.stderr, re.MULTILINE), done.output


@examples(150, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32),
    st.sampled_from(["", "", "main", "collapse,main", "main,drop"]),
    st.sampled_from(["", "--no-nets"]),
)
def test_damaged_folders(seed, order, nets):
    chance = random.Random(seed)
    imported(damaged(chance.choice(SEEDS), chance), *(["--order", order] if order else []), *([nets] if nets else []))


@examples(50)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_any_bytes(solver, script):
    net = SEEDS[0]["net.prototxt"]
    imported({"solver.prototxt": b'net: "net.prototxt" base_lr: 1 ' + solver, "a.sh": script, "net.prototxt": net})
