"""A `source` that is a folder of class folders: counted, checked, imported once, and known again."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import contract
import made_images
import pytest
from facade import SIDE_FILE, CopyStopped, DataError, RecipeError, Schedule, engine, same_set, with_imports

from stagerun.base.recipe import Import
from stagerun.data.importing import have, remove_others
from stagerun.language import load
from stagerun.system import image_folder
from stagerun.system.image_sets import is_there, with_sets
from stagerun.train.compare import what_is_read

SCHEDULE = """
model {{ name: "resnet_small" num_classes: 3 }}
data {{ train {{ source: "train" }} val {{ source: "val" }} {more} }}
solver {{ batch_size: 6 device_batch_size: 3 base_lr: 0.1 lr_policy: "fixed" max_epoch: 2 transform_param {{ crop_size: 20 }} }}
stage {{ name: "one" solver_param {{}} }}
"""


@pytest.fixture
def folder(tmp_path):
    made_images.class_folders(tmp_path / "s" / "train", 30)
    made_images.class_folders(tmp_path / "s" / "val", 9)
    return written(tmp_path / "s")


def written(folder: Path, more: str = "") -> Path:
    (folder / "schedule.prototxt").write_text(SCHEDULE.format(more=more))
    return folder


def read(folder: Path, out: str = "out") -> Schedule:
    return with_sets(with_imports(load(folder), folder / out), lambda stage: None)


def of_train(schedule: Schedule) -> tuple[str, Import]:
    path = schedule.data.train.path
    return path, schedule.imports[path]


def make(schedule: Schedule, stop: Callable[[], bool] = lambda: False) -> list[str]:
    said = []
    for path, made in schedule.imports.items():
        said += have(path, made, schedule.data, stop)
    return said


def test_images_and_classes_are_known_before_anything_is_imported(folder):
    s = read(folder)
    _, made = of_train(s)
    assert made.classes == ("n00000000", "n00000001", "n00000002") and not is_there(made)
    assert s.sets[s.data.train.path] == f"30 records, folder {made.files[:16]}"
    balanced = with_sets(with_imports(load(folder, ("solver.sampling=BALANCED",)), folder / "out"), lambda stage: None)
    assert balanced.class_sizes_of(balanced.stages[0]) == (10, 10, 10)


def test_what_a_run_imports_is_what_data_import_makes(folder):
    s = read(folder)
    said = make(s)
    assert len(said) == 2 and "imported 30 images to" in said[0]
    done = contract.stagerun(["data", "import", "train", "lmdb"], folder)
    assert done.exit_code == 0, done.output
    path, made = of_train(s)
    for name in ("data.mdb", SIDE_FILE):  # by itself it is the same file; after an interruption the same records
        assert (Path(made.lmdb) / name).read_bytes() == (folder / "lmdb" / name).read_bytes()
    assert sorted(os.listdir(folder / "out" / "data")) == sorted(Path(made.lmdb).name for made in s.imports.values())
    assert make(s) == [], "once is enough"
    imported = read(folder)
    assert same_set(imported.sets[path], s.sets[path]), "a plan before and after it"
    lmdb = with_sets(load(folder, (f'data.train.source="{folder / "lmdb"}"',)), lambda stage: None)
    assert same_set(imported.sets[path], next(iter(lmdb.sets.values()))), "the LMDB in its place changes nothing"


def test_an_edit_is_another_set_and_a_touch_is_not(folder):
    before = read(folder)
    make(before)
    known = read(folder)
    path, made = of_train(known)
    image = folder / "train" / "n00000001" / "1.JPEG"
    os.utime(image, ns=(1, 1))
    touched = read(folder)
    assert touched.imports[path].lmdb != made.lmdb, "its bytes may be others"
    assert same_set(known.sets[path], touched.sets[path])
    make(touched)
    assert same_set(known.sets[path], read(folder).sets[path])
    image.write_bytes(made_images.jpeg(99))
    assert same_set(known.sets[path], read(folder).sets[path]) is False, "seen before it is imported"
    make(read(folder))
    known = read(folder)
    data = bytearray(made_images.jpeg(99))
    data[-3] ^= 1
    image.write_bytes(data)
    os.utime(image, ns=(6, 6))
    assert same_set(known.sets[path], read(folder).sets[path]), "of the same size it may be the same"
    make(read(folder))
    assert same_set(known.sets[path], read(folder).sets[path]) is False, "until it is imported"


def test_earlier_states_are_removed_but_for_those_of_other_hosts(folder):
    states = []
    for time in (1, 2, 3):
        os.utime(folder / "train" / "n00000001" / "1.JPEG", ns=(time, time))
        make(s := read(folder))
        states.append(of_train(s)[1])
    assert all(map(is_there, states)), "whoever imports knows not who reads the others"
    remove_others(states[2], [states[1].lmdb])
    left = {Path(one.lmdb).name for one in (*states[1:], s.imports[s.data.val[0].path])}
    assert set(os.listdir(folder / "out" / "data")) == left


def test_of_two_that_come_at_once_one_imports(folder):
    s = read(folder)
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(make, [s] * 3))
    assert sorted(text.partition(": ")[2].split()[1] for one in said for text in one) == ["30", "9"]


def test_a_folder_that_changes_meanwhile_is_refused(folder):
    s = read(folder)
    (folder / "train" / "n00000000" / "new.JPEG").write_bytes(made_images.jpeg(5))
    with pytest.raises(DataError, match="was changed while it was imported"):
        make(s)


def test_an_unfinished_import_in_scratch_is_resumed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "RECORDS_PER_COMMIT", 5)
    scratch = tmp_path / "disk"
    scratch.mkdir()
    s, asked = read(written(folder, more=f'scratch: "{scratch}" scratch_reserve: 0')), [0]
    path, made = of_train(s)
    assert made.in_scratch and Path(made.lmdb).parent.parent == scratch

    def stop() -> bool:
        asked[0] += 1
        return asked[0] > 20

    for _ in range(2):
        asked[0] = 0
        with pytest.raises(CopyStopped):
            have(path, made, s.data, stop)
        shutil.rmtree(Path(made.lmdb).parent)
    with pytest.raises(CopyStopped):
        have(path, made, s.data, lambda: asked.append(0) is None and len(asked) > 20)
    used = have(path, made, s.data, lambda: False)
    assert "resumes behind" in used[0]
    name, home = Path(made.lmdb).name, Path(made.lmdb).parent
    assert sorted(os.listdir(home)) == sorted([name, f"{name}.lock"])
    shutil.rmtree(home)
    assert have(path, made, s.data, lambda: False), "and it is imported again"


def test_a_folder_of_too_many_images_is_not_read(folder, monkeypatch):
    monkeypatch.setattr(image_folder, "MOST", 20)
    (folder / "train" / "zzz").mkdir()  # would be said to be empty, if it were still read
    with pytest.raises(RecipeError, match="more than 20 images in class folders, and a `source` has 20") as caught:
        load(folder)
    assert "stagerun data import" in caught.value.problems[0].hint


def test_hosts_with_other_images_are_told_apart_before_anything_is_imported(folder):
    one = what_is_read(load(folder), []).images
    make(read(folder))
    assert what_is_read(load(folder), []).images == one
    (folder / "val" / "n00000000" / "0.JPEG").write_bytes(b"other")
    other = what_is_read(load(folder), []).images
    assert other[0] == one[0] and other[1] != one[1]
