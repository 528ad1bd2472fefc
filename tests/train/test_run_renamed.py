"""`stagerun run` after a stage got another name: what was trained stays, and goes on under the new one."""

import csv
import errno
import io
import json
import re
import shutil
from pathlib import Path

import audited
import pytest
import tiny
from facade import EnsembleTested, Iterated, PieceStarted, StageStarted, StorageError
from test_run_trees import ALONE, command, go, ids, make_schedule, mtimes, names, of

from stagerun import store
from stagerun.language import load

MAIN = 'stage { name: "main" }\n'
ONE = 'stage { name: "cut" from: "main@3" }\n'
TWO = ONE.replace('"main@3"', '["main@3", "main@5"]')
DEEP = 'stage { name: "deep" from: "cut" solver: "cut.prototxt" }\n'
BOTH = 'ensemble { name: "both" members: ["cut", "deep"] }\n'


def by_stage(out: Path) -> dict[str, dict[str, str]]:
    text = command("report", out, "--by", "stage", "--format", "csv")
    return {row["stage"]: row for row in csv.DictReader(io.StringIO(text))}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folders of results may be links."""
    base = tmp_path_factory.mktemp("renamed")
    for link, to in (("out/results", "results"), ("results/ensembles", "ensembles")):
        (base / to).mkdir()
        (base / link).parent.mkdir(exist_ok=True)
        (base / link).symlink_to(base / to)
    tiny.make_data(base / "data")
    make_schedule(base / "schedule", base / "data", MAIN + ONE + DEEP + BOTH)
    command("run", base / "schedule", "--out", base / "out", *ALONE)
    return base


@pytest.mark.long
def test_one_more_parent_trains_one_more_stage(base, tmp_path):
    out = shutil.copytree(base / "out", tmp_path / "out")
    before = mtimes(out)
    grown = MAIN + TWO + (DEEP + BOTH).replace('"cut"', '"cut_main_3"')
    schedule = make_schedule(tmp_path / "s", base / "data", grown)
    text = command("plan", schedule, "--out", out)
    assert "  done: trained as `cut`" in text.splitlines()
    assert next(line for line in text.splitlines() if line.startswith("both ")).split()[-6] == "top-1"
    listed = command("status", "--snapshots", schedule, "--out", out).splitlines()
    assert next(line for line in listed if line.startswith("cut-")).endswith("end of cut_main_3, start of deep")
    events = go(schedule, out)
    assert [(e.stage, e.start) for e in of(events, StageStarted)] == [("cut_main_5", "main-00000005-a0002")]
    assert [(e.iter, e.until) for e in of(events, PieceStarted)] == [(3, 5)] and not of(events, EnsembleTested)
    assert before.items() <= mtimes(out).items()
    done = command("run", schedule, "--out", out, *ALONE)
    assert done.startswith("nothing to do") and "cut_main_3" in done and "\ncut " not in done
    told = json.loads(command("status", schedule, "--out", out, "--json"))
    assert set(told["top1"]) == {"main", "cut_main_3", "cut_main_5", "deep"}
    asked = ("eval", schedule, "--out", out, "--stage", "cut_main_3", "--threads", 1, "--json")
    (row,) = json.loads(command(*asked))["evaluations"]
    assert (row["stage"], row["snapshot"]) == ("cut_main_3", names(out, "cut-")[0])


@pytest.mark.long
def test_the_report_and_the_status_of_the_folder_have_the_new_names(base, tmp_path):
    out = shutil.copytree(base / "out", tmp_path / "out")
    stages = 'stage { name: "trunk" solver: "main.prototxt" }\n' + (TWO + DEEP + BOTH).replace("main@", "trunk@")
    stages = stages.replace('from: "cut"', 'from: "cut_trunk_3"').replace('["cut"', '["cut_trunk_3"')
    schedule = make_schedule(tmp_path / "s", base / "data", stages)
    before = by_stage(out)
    command("run", schedule, "--out", out, *ALONE)
    after = by_stage(out)
    assert list(after) == ["trunk", "cut_trunk_3", "cut_trunk_5", "deep"]
    assert [row["from"] for row in after.values()] == ["seed", "trunk@3", "trunk@5", "cut_trunk_3"]
    assert {row["state"] for row in after.values()} == {"done"}
    for old, new in [("main", "trunk"), ("cut", "cut_trunk_3"), ("deep", "deep")]:
        same = {k: v for k, v in before[old].items() if k not in ("stage", "from")}
        assert same == {k: after[new][k] for k in same}, "nothing that was trained is missing"
    text = command("report", out)
    assert "\nensemble both " in text and "no longer in the schedule" not in text
    told = json.loads(command("status", out, "--json"))
    assert set(told["top1"]) == set(after) and set(told["stages"].values()) == {"ok"}


def test_renamed_in_its_midst_it_comes_to_the_same_weights(base, tmp_path):
    out, old = tmp_path / "out", make_schedule(tmp_path / "old", base / "data", MAIN + ONE)
    go(old, out, stop=lambda seen: any(e.iter == 5 for e in of(seen, Iterated)))
    assert names(out) == ["main-00000003-a0001", "main-00000006-a0001"]
    text = 'stage { name: "trunk" solver: "main.prototxt" }\n' + ONE.replace("main@3", "trunk@3")
    new = make_schedule(tmp_path / "new", base / "data", text)
    events = go(new, out)
    assert [(e.stage, e.iter, e.start) for e in of(events, StageStarted)] == [
        ("trunk", 6, "main-00000006-a0001"),
        ("cut", 0, "main-00000003-a0001"),
    ]
    # The step at 6 has had its day; what `cut` starts from is kept.
    assert names(out) == ["cut-00000002-a0002", "main-00000003-a0001", "trunk-00000008-a0002"]
    found = {ref.name: ref for ref in store.inventory(store.LocalDisk(), out).snapshots}
    straight = ids(base / "out")
    assert found["trunk-00000008-a0002"].id == straight["main@8"], "it is the same, whatever it is called"
    assert found["cut-00000002-a0002"].id == straight["cut@2"]


def test_a_result_that_cannot_be_read_back_ends_the_run(base, tmp_path):
    """Else the stage would be evaluated again and again, for ever."""
    out = shutil.copytree(base / "out", tmp_path / "out")
    for name in ("deep-00000002-a0001", "ensembles/both"):
        path = out / "results" / f"{name}.json"
        assert path.exists()
        with audited.refused(path, errno.EIO), pytest.raises(StorageError, match="can't be read back"):
            go(base / "schedule", out)
    assert go(base / "schedule", out)


def test_in_another_folder_nothing_is_evaluated_again(base, tmp_path):
    """Nor where an earlier version has written on what the results are."""
    data, out = (shutil.copytree(base / name, tmp_path / "moved" / name) for name in ("data", "out"))
    schedule = make_schedule(tmp_path / "s", data, MAIN + ONE + DEEP + BOTH)
    assert command("run", schedule, "--out", out, *ALONE).startswith("nothing to do")
    old = re.sub(", crop_size_ramp.*", ")", str(load(schedule).stages[0].solver.test_transform))
    for path in (out / "results").rglob("*.json"):
        path.write_text(re.sub(r"\{ .* \}", old, path.read_text()))
    assert command("run", schedule, "--out", out, *ALONE).startswith("nothing to do")
