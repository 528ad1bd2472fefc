"""`stagerun diff` of what a run was made from, and its picture; cases/diff*.txt have what it prints of folders."""

import os
from pathlib import Path

import contract
import disks
from click.testing import CliRunner, Result

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


def run(out: Path, *trained: tuple[str, Path]) -> Path:
    """The output of a run whose stages were trained, one after the other, by the schedules in these folders."""
    store.prepare(store.LocalDisk(), out)
    for clock, (name, folder) in enumerate(trained):
        of = load(folder)
        stage, files = of.stage(name), {"recipe.prototxt": canonical(of).encode()}
        end, attempt = stage.solver.max_iter, 1 + clock
        ref = disks.commit(store.LocalDisk(), out, name, end, attempt, files, identity=stage.identity)
        os.utime(out / "snapshots" / ref.name / "MANIFEST.json", (clock, clock))
    return out


def test_a_run_that_kept_a_changed_stage_is_what_that_was_trained_from(tmp_path):
    before = edited(tmp_path / "before")
    now = edited(tmp_path / "now", "trunk", "0.1", "0.2")
    out = run(tmp_path / "out", ("trunk", before), ("long", now))
    assert diff(out, out).stdout.endswith("nothing differs\n") and "nothing differs" in diff(out, before).stdout
    said = diff(out, now).stdout
    assert "\ntrunk\n  base_lr  0.1  ->  0.2 (" in said and said.count("->") == 1


def test_a_run_that_kept_a_stage_of_other_images_or_another_network(tmp_path):
    before = edited(tmp_path / "before")
    for number, (old, new, field) in enumerate(
        [('"/d/train" images: 1000', '"/d/more" images: 2000', "data"), ("resnet_small", "resnet18", "model")]
    ):
        now = edited(tmp_path / str(number), "schedule", old, new)
        out = run(tmp_path / f"out{number}", ("trunk", before), ("long", now))
        said = diff(out, now).stdout
        assert f"\ntrunk\n  {field}  " in said and said.count("->") == 1
        assert said.endswith("they train different things\n")
    assert "nothing differs" in diff(run(tmp_path / "same", ("trunk", before), ("long", before)), before).stdout
