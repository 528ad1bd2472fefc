"""`stagerun diff` of what a run was made from, and its picture; and `stagerun fmt`. cases/ have what both print."""

import os
from pathlib import Path

import contract
import disks
import pytest
from click.testing import CliRunner, Result
from facade import Iterated, JsonLines, Proof, RunStarted, StageStarted, formatted
from hypothesis import example, given
from hypothesis import strategies as st

from stagerun import store
from stagerun.cli import main
from stagerun.language import canonical, load

CASE = contract.Case.read(contract.CASES / "diff_trees.txt")


def diff(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, arguments)])


def edited(folder: Path, file: str = "schedule", old: str = "", new: str = "") -> Path:
    """A schedule's folder, with an edit."""
    CASE.write(folder)
    path = folder / "a" / f"{file}.prototxt"
    path.write_text(path.read_text().replace(old, new))
    return folder / "a"


def run(out: Path, *trained: tuple[str, Path], **about: object) -> Path:
    """The output of a run whose stages were trained, one after the other, by the schedules in these folders."""
    store.prepare(store.LocalDisk(), out)
    for clock, (name, folder) in enumerate(trained):
        of = load(folder)
        stage, files = of.stage(name), {"recipe.prototxt": canonical(of).encode()}
        end, attempt = stage.solver.max_iter, 1 + clock
        ref = disks.commit(store.LocalDisk(), out, name, end, attempt, files, **{"identity": stage.identity, **about})
        os.utime(out / "snapshots" / ref.name / "MANIFEST.json", (clock, clock))
    return out


@pytest.mark.parametrize(
    ("file", "old", "new", "field"),
    [
        ("trunk", "0.1", "0.2", "base_lr  0.1  ->  0.2 ("),
        ("schedule", '"/d/train" images: 1000', '"/d/more" images: 2000', "data.train.images  "),
        ("schedule", "resnet_small", "resnet18", "model.name  "),
    ],
)
def test_a_run_that_kept_a_changed_stage_is_what_that_was_trained_from(tmp_path, file, old, new, field):
    before, now = edited(tmp_path / "before"), edited(tmp_path / "now", file, old, new)
    out = run(tmp_path / "out", ("trunk", before), ("long", now))
    assert diff(out, out).stdout.endswith("nothing differs\n")
    said = diff(out, now).stdout
    assert f"\ntrunk\n  {field}" in said and said.endswith("the schedules train different things\n")


# -- the first difference of two runs, by what they record

HERE = {
    "torch": "2.9.0", "numpy": "2.0", "stagerun": "1", "processor": "Xeon", "processor flags": "avx2", "device": "cpu", "threads": "1",
    "workers": "1", "reducer": "none", "training set": "9 records, sample ab",
}  # fmt: skip


def logged(out: Path, proofs: dict[int, str], losses: dict[int, float] | None = None, threads: int = 1) -> Path:
    """The log of a run of `trunk` with these proofs and losses."""
    life = RunStarted(
        schedule="tree", out="out", workers=1, device="cpu", threads=threads, stages=(), iterations=20, iterations_left=20,
        version="1", attempt=1,
    )  # fmt: skip
    start = StageStarted(
        stage="trunk", number=1, iter=0, max_iter=20, start="", batch_size=1, device_batch_size=1, begins=0
    )
    rate = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    with JsonLines(out / "log.jsonl", print) as log:
        log(life)
        log(start)
        for iter, loss in (losses or {}).items():
            log(Iterated(stage="trunk", iter=iter, epoch=0.0, **rate, loss=loss, images=1, seconds=1.0))
        for iter, state in proofs.items():
            log(Proof(stage="trunk", iter=iter, state=state, chain=state))
    return out


def pair(tmp_path: Path, **facts: str) -> tuple[Path, Path]:
    """Two runs of a schedule, the second with these facts of its environment."""
    folder = edited(tmp_path / "schedule")
    environments = {"a": HERE, "b": HERE | {name.replace("_", " "): value for name, value in facts.items()}}
    a, b = (run(tmp_path / of, ("trunk", folder), environment=facts) for of, facts in environments.items())
    return a, b


def test_equal_runs_and_runs_without_a_state_in_common(tmp_path):
    a, b = pair(tmp_path)
    for out in (a, b):
        logged(out, {0: "s", 5: "t", 20: "u"})
    assert "the runs are equal: 3 states compared, none of `long`, `collapse`" in diff(a, b).stdout
    folder = tmp_path / "schedule/a"
    for path in (a, b):
        (path / "log.jsonl").unlink()
    assert "the runs are equal: 1 state compared" in diff(a, b).stdout
    assert diff(a, folder, "--first").exit_code == 64


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"torch": "3"}, "library: torch 2.9.0 -> 3"),
        ({"numpy": "3"}, "library: numpy 2.0 -> 3"),
        ({"processor": "Z80"}, "processor: processor Xeon -> Z80"),
        ({"device": "H200"}, "processor: device cpu -> H200"),
        ({"training_set": "9 records, sample cd"}, "data: training set: other images, or in another order"),
        ({"training_set": "9 records, index cd"}, "nothing that is recorded differs"),
        ({"processor": "unknown"}, "nothing that is recorded differs"),
    ],
)
def test_the_cause_is_what_the_runs_record(tmp_path, facts, kind):
    a, b = pair(tmp_path, **facts)
    logged(a, {0: "s", 5: "t", 10: "u"})
    logged(b, {0: "s", 5: "t", 10: "v"})
    said = diff(a, b).stdout
    assert "the first difference: stage trunk, between iterations 6 and 10\n" in said and f"  cause    {kind}" in said


def test_losses_and_lives_narrow_it_and_threads_are_of_the_life(tmp_path):
    a, b = pair(tmp_path, threads="2")
    logged(a, {0: "s", 5: "t", 10: "u"}, dict.fromkeys(range(1, 11), 1.5))
    logged(b, {0: "s", 5: "t", 10: "v"}, dict.fromkeys(range(1, 7), 1.5) | {7: 1.25})
    said = diff(a, b).stdout
    assert "stage trunk, between iterations 6 and 7\n" in said and "nothing that is recorded differs" in said
    logged(b, {0: "s", 5: "t", 6: "v"}, threads=2)
    logged(a, {0: "s", 5: "t", 6: "u"})
    said = diff(a, b).stdout
    assert "stage trunk, at iteration 6, equal up to 5\n" in said and "cause    threads: threads 1 -> 2" in said


def test_a_field_that_left_the_rate_as_it_was_explains_nothing(tmp_path):
    one, other = edited(tmp_path / "one"), edited(tmp_path / "other", "trunk", "max_iter: 20", "max_iter: 40")
    third = edited(tmp_path / "third", "schedule", "crop_size: 28", "crop_size: 27")
    outs = [run(tmp_path / f"out{n}", ("trunk", folder)) for n, folder in enumerate((one, other, third))]
    for out, state in zip(outs, "uvw", strict=True):
        logged(out, {0: "s", 1: state}, {1: 1.5})
    assert "nothing that is recorded differs" in diff(*outs[:2]).stdout
    assert "cause    schedule: transform_param.crop_size 28 -> 27" in diff(outs[0], outs[2]).stdout
    for out, state in zip(outs, "uvw", strict=True):
        logged(out, {0: state})
    assert "stage trunk, in the state that it starts with\n" in diff(*outs[:2]).stdout


# -- `stagerun fmt`: that meaning, comments and links stay. cases/fmt: its style, and what it prints

SOLVERS = Path(__file__).parents[2] / "solvers"


@pytest.mark.parametrize("folder", sorted(SOLVERS.iterdir()), ids=lambda path: path.name)
def test_the_gallery_is_in_it(folder):
    for path in folder.glob("*.prototxt"):
        if "proto-file: protos/stagerun" in path.read_text():
            assert formatted(path.read_text()) == path.read_text(), f"stagerun fmt {folder}"


GAPS = st.sampled_from([" ", "  ", "\t", "\n", "\n\n", " # c\n", "#\n", "\n# d\n", "\r\n"])
FIELDS = st.recursive(
    st.sampled_from([["x", ":", "1"], ["y", ":", '"#"'], ["y", ":", "'a'", '"b"'], ["z", ":", "[", "1", ",", "-2", "]"], ["w", ":", "[", "]"]]),
    lambda inner: st.builds(
        lambda fields, marks, colon: ["m", *[":"] * colon, marks[0], *(token for one in fields for token in one), marks[1]],
        st.lists(inner, max_size=3), st.sampled_from(["{}", "<>"]), st.booleans(),
    ),
)  # fmt: skip


@given(st.lists(FIELDS, max_size=5), st.data())
@example([["m", "{", "x", ":", "1", "}"]], None)
def test_twice_is_once_and_comments_stay(fields, data):
    gaps = [data.draw(GAPS) if data else " # c\n" for one in fields for _ in one]
    text = "".join(token + gap for token, gap in zip((t for one in fields for t in one), gaps, strict=True))
    once = formatted(text)  # which asserts that the tokens mean the same
    assert formatted(once) == once
    for comment in (" c", " d"):
        assert once.count(f"#{comment}") == text.count(f"#{comment}")


def test_a_long_line_takes_no_longer_than_it_must():
    text = f"stepvalue: [{', '.join(map(str, range(30_000)))}]\n"
    assert formatted(text) == text


def test_a_link_and_the_mode_of_a_file_stay_as_does_what_it_means(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    for path in (SOLVERS / "fashion_collapse").glob("*.prototxt"):
        (folder / path.name).write_text(path.read_text())
    before = canonical(load(folder))
    real = tmp_path / "kept.prototxt"
    (folder / "cyc1.prototxt").rename(real)
    (folder / "cyc1.prototxt").symlink_to(real)
    real.write_text(real.read_text().replace("base_lr: 0.09", "base_lr :0.09;# peak"))
    real.chmod(0o640)
    done = contract.stagerun(["fmt", folder, f"{folder}/"], tmp_path)
    assert done.output == f"{folder}/cyc1.prototxt: formatted\n1 of 6 files changed\n"
    assert (folder / "cyc1.prototxt").is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert canonical(load(folder)) == before
