"""A snapshot that is gone and is trained again, under stages that came from it: by the same workers to the same bits, by others not
before it was said what is to become of those stages."""

import json
import shutil

import pytest
import small
import tiny
from facade import ResumeRefused
from test_run_trees import ALONE, END, MAIN, command, go, ids, make_schedule, names

C = 'stage { name: "c" from: "main@5" solver: "cut.prototxt" }\nstage { name: "on" from: "c" solver: "cut.prototxt" }\n'
D = 'stage { name: "d" from: "main@5" solver: "cut.prototxt" }\n'


@pytest.fixture(scope="module")
def by_two(tmp_path_factory):
    """whole/ of a trunk, a branch off it, what follows from that, and from the trunk's end, by two workers; out/, where the branch's
    start is gone; schedule/ with one more branch there."""
    folder = tmp_path_factory.mktemp("two")
    tiny.make_data(folder / "data")
    schedule = make_schedule(folder / "schedule", folder / "data", MAIN + C + END)
    small.run(schedule, folder / "out", nproc=2, code=0)
    shutil.copytree(folder / "out", folder / "whole")
    shutil.rmtree(folder / "out" / "snapshots" / "main-00000005-a0001")
    make_schedule(schedule, folder / "data", MAIN + C + D + END)
    return folder


def test_a_piece_by_another_number_of_workers_is_refused_before_it_makes_a_finished_stage_stale(by_two, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(by_two / "out", out)
    text = command("plan", by_two / "schedule", "--out", out)
    assert "  lost: main@5, the start of c; retraining reproduces its bits only in the same environment" in text
    assert "as of main-00000008-a0001: device cpu" in text and "workers 2" in text
    assert "`run` trains nothing until the command has an option for c" in text
    (record,) = json.loads(command("plan", by_two / "schedule", "--out", out, "--json"))["lost"]
    assert (record["name"], record["iter"], record["children"], record["named"]) == ("main", 5, ["c"], [])
    assert record["like"] == "main-00000008-a0001" and record["environment"]["workers"] == "2"
    before = names(out)
    refused = command("run", by_two / "schedule", "--out", out, *ALONE, code=78)
    assert "`main@5` is missing and would be trained again, in another environment than before" in refused
    assert "with other bits `c`, which start from it, would be stale" in refused and "  workers: 2 -> 1\n" in refused
    assert "run in the same environment" in refused
    assert "`--redo c` trains these stages again here" in refused
    assert "Iterated" not in (out / "log.jsonl").read_text().split("RunStarted")[-1]
    assert names(out) == before, "nothing was trained"


@pytest.mark.slow
def test_redo_is_a_way_out_of_that_refusal(by_two, tmp_path):
    schedule, out = by_two / "schedule", tmp_path / "out"
    shutil.copytree(by_two / "out", out)
    told = command("run", schedule, "--out", out, "--redo", "c", *ALONE)
    assert "main@5 again is EQUIVALENT, not BIT-EXACT, before: main-00000008-a0001: " in told
    assert "--redo has noth" not in told
    assert "with other bits, c will be retrained, as `--redo` asks" in told
    assert ids(out)["main@5"] != ids(by_two / "whole")["main@5"], "else this shows nothing"
    last = ["c-00000002-a0002", "on-00000002-a0002", "d-00000002-a0002", "main-00000008-a0001"]
    assert set(last) <= set(names(out))
    assert not go(schedule, out)[-1].trained


@pytest.mark.parametrize(("gone", "lost", "child", "like"), [
    ("main-00000008-a0001", "main", "end", "main-00000005-a0001"), ("c-00000002-a0001", "c", "on", "on-00000002-a0001"),
])  # fmt: skip
def test_an_end_is_not_made_again_elsewhere_under_a_finished_stage(by_two, tmp_path, gone, lost, child, like):
    out = tmp_path / "out"
    shutil.copytree(by_two / "whole", out)
    shutil.rmtree(out / "snapshots" / gone)
    before = names(out)
    with pytest.raises(ResumeRefused) as caught:
        go(by_two / "schedule", out)
    message = (
        f"the end of `{lost}` is missing and would be trained again, in another environment than before ({like}); "
    )
    assert message + f"with other bits `{child}`, which" in caught.value.message and names(out) == before
    assert go(by_two / "schedule", out, redo=[child])[-1].trained
    # The life that was refused has the number between.
    assert set(names(out, child)) == {f"{child}-00000002-a0001", f"{child}-00000002-a0003"}
