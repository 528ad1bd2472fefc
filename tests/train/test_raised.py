"""`max_iter` raised after a stage had ended: trained on from there, to the bits of one that was as long from the start."""

import json
import shutil
from pathlib import Path

import nan_help
import pytest
from facade import Iterated, SnapshotRef, StageStarted, Stopped, Tested
from test_run_trees import ALONE, FILES, command, go, ids, make_schedule, names, of

import stagerun
from stagerun import store

pytestmark = pytest.mark.long

MAIN = 'stage { name: "main" }\n'
BELOW = 'stage { name: "early" from: "main@3" solver: "cut.prototxt" }\nstage { name: "end" from: "main" solver: "cut.prototxt" }\n'
SHORT = FILES["main"].replace("max_iter: 8", "max_iter: 5")


def ends(out: Path, stage: str) -> list[SnapshotRef]:
    return [ref for ref in store.inventory(store.LocalDisk(), out).snapshots if ref.stage == stage and ref.ends_stage]


@pytest.mark.parametrize(
    "more",
    [
        'lr_policy: "plateau" gamma: 0.5 plateau_winsize: [2, 2] average_loss: 2',
        'lr_policy: "piecewise_linear" knot { iter: 0 factor: 1 } knot { iter: 10 factor: 0 } momentum: 0.9 warmup_iter: 2 compress_param { method: TOP_K ratio: 0.05 }',
        'type: "Adam" momentum: 0.9 mixup_alpha: 0.2 ema_decay: 0.9',
    ],
)
def test_what_the_state_holds_goes_on(data, tmp_path, more):
    def written(length: int) -> str:
        rest = "" if "lr_policy" in more else ' lr_policy: "fixed"'
        return f"base_lr: 0.05 max_iter: {length} snapshot: 2 {more}{rest}\n"

    long = make_schedule(tmp_path / "long", data, MAIN, main=written(12))
    go(long, tmp_path / "straight")
    schedule = make_schedule(tmp_path / "s", data, MAIN, main=written(5))
    go(schedule, tmp_path / "out")
    make_schedule(schedule, data, MAIN, main=written(12))
    # Stopped on the way, too.
    seen = go(schedule, tmp_path / "out", stop=lambda events: len(of(events, Iterated)) == 3)
    assert [(e.iter, e.max_iter, e.start) for e in of(seen, StageStarted)] == [(5, 12, "main-00000005-a0001")]
    assert of(seen, Stopped)
    go(schedule, tmp_path / "out")
    (straight,), made = ends(tmp_path / "straight", "main"), ends(tmp_path / "out", "main")[-1]
    assert (made.iter, made.id) == (12, straight.id)


def test_a_shorter_stage_goes_on_from_its_newest_snapshot_before_its_end(data, tmp_path):
    """To the bits of one that was as short from the start; without such a snapshot, or where the rate reads max_iter, it is stale."""

    def made(length: int, policy: str = "fixed") -> Path:
        text = f'base_lr: 0.05 lr_policy: "{policy}" max_iter: {length} snapshot: 2 power: 1\n'
        file = make_schedule(tmp_path / "s", data, MAIN, main=text) / "schedule.prototxt"
        file.write_text(file.read_text().replace("keep_snapshots: 1", "keep_snapshots: 9"))
        return file.parent

    go(made(8), tmp_path / "long")
    for to, start in ((7, 6), (6, 4)):
        out, straight = shutil.copytree(tmp_path / "long", tmp_path / f"{to}"), tmp_path / f"straight{to}"
        planned = json.loads(command("plan", made(to, "poly"), "--out", out, "--json"))
        assert planned["stages"][0]["state"] == "stale"
        schedule = made(to)
        assert f"max_iter 8 -> {to}" in command("plan", schedule, "--out", out)
        assert [(e.iter, e.max_iter) for e in of(go(schedule, out), StageStarted)] == [(start, to)]
        go(schedule, straight)
        assert ends(out, "main")[-1].id == ends(straight, "main")[-1].id
        assert not of(go(schedule, out), Iterated)
    assert "max_iter 8 -> 2" in command("run", made(2), "--out", tmp_path / "long", *ALONE, code=78)


def test_a_raised_trunk_and_its_branches(data, tmp_path):
    schedule, out = make_schedule(tmp_path / "s", data, MAIN + BELOW, main=SHORT), tmp_path / "out"
    command("run", schedule, "--out", out, *ALONE)
    before = ids(out)
    make_schedule(schedule, data, MAIN + BELOW)  # 8 iterations
    refused = command("run", schedule, "--out", out, *ALONE, code=78)
    assert (
        'it started from the end of `main`, which continues from iteration 5 to 8 (`from: "main@5"` keeps it)'
        in refused
    )
    assert "`--redo end`" in refused and ids(out) == before

    # As the refusal says: what started there stays where it started, and another one starts from the new end.
    stays = (
        BELOW.replace('from: "main" ', 'from: "main@5" ')
        + 'stage { name: "new" from: "main" solver: "cut.prototxt" }\n'
    )
    make_schedule(schedule, data, MAIN + stays)
    said = command("run", schedule, "--out", out, *ALONE)
    assert "main: resume at 5, continues from iteration 5 to 8, from main-00000005-a0001, max_iter 5 -> 8 (" in said
    events = [json.loads(line) for line in (out / "log.jsonl").read_text().split('"RunStarted"')[-1].splitlines()[1:]]
    assert [(e["stage"], e["iter"]) for e in events if e["event"] == "StageStarted"] == [("main", 5), ("new", 0)]
    straight = make_schedule(tmp_path / "straight", data, MAIN + stays)
    go(straight, tmp_path / "whole")
    assert ids(out) == ids(tmp_path / "whole") and before.items() <= ids(out).items()
    assert "main-00000005-a0001" in names(out, "main"), "a branch starts there"

    # Results, reports and tables are those of the new end.
    results = {p.stem: json.loads(p.read_text())["iterations"] for p in (out / "results").glob("main-*.json")}
    assert results["main-00000008-a0002"] == 8
    whole = json.loads(next((tmp_path / "whole" / "results").glob("main-*.json")).read_text())
    made = json.loads((out / "results" / "main-00000008-a0002.json").read_text())
    assert all(made[name] == whole[name] for name in ("top1", "loss", "iterations", "train_loss") if name in whole)
    assert "main   seed             8" in command("report", out)
    assert not of(go(schedule, out), Iterated)
    # Stopped on the way, its old end is not its result.
    make_schedule(schedule, data, MAIN + stays, main=FILES["main"].replace("8", "13"))
    go(schedule, out, redo=["new"], stop=lambda events: len(of(events, Iterated)) == 2)
    planned = json.loads(command("plan", schedule, "--out", out, "--json"))["stages"][0]
    assert planned["state"] == "resume" and 8 < planned["iter"] < 13


def test_the_evaluation_at_the_old_end_may_end_the_stage(data, tmp_path):
    def written(length: int) -> str:
        return f'base_lr: 0.05 lr_policy: "fixed" max_iter: {length} test_interval: 3 early_stop {{ metric: LOSS patience_iter: 3 min_delta: 100 }}\n'

    schedule, out = make_schedule(tmp_path / "s", data, MAIN + BELOW, main=written(6)), tmp_path / "out"
    go(schedule, out)
    before = ids(out)
    make_schedule(schedule, data, MAIN + BELOW, main=written(9))
    seen = go(schedule, out, redo=["end"])
    assert [e.iter for e in of(seen, Tested) if e.stage == "main"] == [6, 6] and not of(seen, Iterated)
    assert ids(out) == before, "so what started there is up to date"
    assert [ref.ended for ref in ends(out, "main")][-1] and "ended at iteration 6" in command(
        "plan", schedule, "--out", out
    )
    go(make_schedule(tmp_path / "long", data, MAIN + BELOW, main=written(9)), tmp_path / "straight")
    assert ids(tmp_path / "straight") == before


@pytest.mark.parametrize("determinism", ["FIXED", "ELASTIC"])
def test_two_workers_are_killed_after_the_raise(tmp_path, determinism):
    images = nan_help.make_data(tmp_path / "lmdb")

    def written(folder: str, length: int) -> Path:
        return nan_help.make_schedule(
            tmp_path / folder, images, shared=f"determinism: {determinism}", main=f"max_iter: {length} snapshot: 3"
        )

    nan_help.lives(written("long", 8), tmp_path / "whole", 2)
    schedule, out = written("s", 4), tmp_path / "out"
    nan_help.lives(schedule, out, 2)
    nan_help.lives(written("s", 8), out, 2, kill_after=3)
    seen = nan_help.lives(schedule, out, 1 if determinism == "ELASTIC" else 2)
    assert of(seen, StageStarted)[0].iter == 6
    assert ends(out, "main")[-1].id == ends(tmp_path / "whole", "main")[-1].id


def test_its_proofs_are_one_chain_and_its_old_end_is_no_result(data, tmp_path):
    schedule, out = tmp_path / "s", tmp_path / "out"
    for length in (5, 9):
        rate = f'base_lr: 0.05 lr_policy: "fixed" max_iter: {length} snapshot: 4 audit_param {{ proof_iter: 3 }}\n'
        make_schedule(schedule, data, MAIN, main=rate)
        with stagerun.run(schedule, out, threads=1) as run:
            next((event for event in run if isinstance(event, Iterated) and event.iter == 7), None)
    head = next(line for line in command("report", out).splitlines() if line.startswith("stage  from"))
    assert "top-1" not in head
    command("run", schedule, "--out", out, *ALONE)
    assert "BIT-EXACT" in command("verify", schedule, "--out", out, *ALONE)
