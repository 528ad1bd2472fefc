"""BIT-EXACT or EQUIVALENT: said wherever something goes on, with each reason; and which images an update has, whoever computes it."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import small
import tiny
import torch
from test_plan_trees import SCHEDULE, inventory, on_disk, schedule, snapshot

from stagerun.comm import runs_of
from stagerun.engine.device import environment
from stagerun.errors import ResumeRefused
from stagerun.events import Note
from stagerun.plan import Plan, make_plan
from stagerun.recipe import Determinism, Ensemble, Schedule
from stagerun.runner.environment import environment_of, promise, promise_of_ensemble, require_exact
from stagerun.runner.stage import requests
from stagerun.snapshots import SnapshotRef

CPU = torch.device("cpu")
TRAIN = 'train { source: "/d/train" images: 1000 }'
WITH_VAL = SCHEDULE.replace(TRAIN, TRAIN + ' val { source: "/d/val" images: 100 }')
CHANGES = {
    "torch": "2.0",
    "instruction set": "SSE",
    "threads": "77",
    "workers": "3",
    "reducer": "another",
    "image library": "another",
    "stagerun": "0",
    "device": "Some GPU",
}


def now(of: Schedule) -> dict[str, str]:
    return environment_of(of, of.stages[0], CPU, workers=2)


def plan(of: Schedule, refs: list[SnapshotRef], **changed: str) -> Plan:
    """With these snapshots, as if made in an environment like this one but for what is `changed`."""
    return make_plan(of, inventory([replace(ref, environment=now(of) | changed) for ref in refs]))


def told(of: Schedule, planned: Plan, stage: str) -> tuple[str, bool]:
    """The text and whether it is a warning; empty where nothing is said."""
    (one,) = [s for s in planned.stages if s.stage.name == stage]
    note = promise(of, one, now(of))
    return ("", False) if note is None else (note.text, note.warning)


def places(of: Schedule) -> dict[str, list[SnapshotRef]]:
    """What is on disk where `main` goes on inside, where it is done and `end` begins, and where all of it is done."""
    inside = [snapshot(of, "main", 6)]
    done = [ref for place, ref in on_disk(of).items() if place.startswith("main@")]
    return {"inside": inside, "start": done}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("where", ["inside", "start", "evaluation"])
def test_each_reason_is_told_wherever_something_goes_on(name: str, where: str) -> None:
    of = schedule(WITH_VAL)
    stage = {"inside": "main", "start": "end", "evaluation": "main"}[where]
    refs = places(of)["inside" if where == "inside" else "start"]
    what = "the evaluation of main" if where == "evaluation" else "resume"
    text, warning = told(of, plan(of, refs, **{name: CHANGES[name]}), stage)
    assert text.startswith(f"{what} is EQUIVALENT, not BIT-EXACT: {name}: {CHANGES[name]} -> ") and warning


def test_with_all_as_before_it_is_bit_exact_and_a_start_says_nothing() -> None:
    of = schedule(WITH_VAL)
    same = "same torch build, instruction set, threads, workers and reducer"
    assert told(of, plan(of, places(of)["inside"]), "main") == (f"resume is BIT-EXACT: {same}", False)
    done = plan(of, places(of)["start"])
    assert told(of, done, "main") == (f"the evaluation of main is BIT-EXACT: {same}", False)
    assert told(of, done, "end") == ("", False)
    without = schedule()
    assert told(without, plan(without, places(without)["start"], threads="77"), "main") == ("", False), (
        "nothing to evaluate"
    )


def test_a_gpu_is_promised_nothing() -> None:
    of = schedule()
    (one,) = [s for s in plan(of, places(of)["inside"], device="Some GPU").stages if s.stage.name == "main"]
    note = promise(of, one, now(of) | {"device": "Some GPU"})
    assert note is not None and "BIT-EXACT" not in note.text and "was not verified" in note.text


def test_with_elastic_the_number_of_workers_is_no_reason_and_all_others_are() -> None:
    of = replace(schedule(), determinism=Determinism.ELASTIC)
    assert told(of, plan(of, places(of)["inside"], workers="5"), "main")[0].startswith("resume is BIT-EXACT")
    for name in CHANGES.keys() - {"workers"}:
        text, _ = told(of, plan(of, places(of)["inside"], workers="5", **{name: CHANGES[name]}), "main")
        assert "EQUIVALENT" in text and f"{name}: " in text and "workers" not in text


def test_what_is_not_promised_is_refused_where_that_is_asked_for() -> None:
    of = schedule(WITH_VAL)
    for refs, stage in ((places(of)["inside"], "main"), (places(of)["start"], "end")):
        for changed in ({"threads": "77"}, {}):
            (one,) = [s for s in plan(of, refs, **changed).stages if s.stage.name == stage]
            said = promise(of, one, now(of))
            if not changed:
                require_exact(said)
                continue
            with pytest.raises(ResumeRefused, match=r"--require-bit-exact: resume is EQUIVALENT.*threads: 77 -> "):
                require_exact(said)
    with pytest.raises(ResumeRefused, match="was not verified"):
        require_exact(
            Note(text="resume with everything as before; that a GPU then gives the same bits was not verified")
        )


def test_an_ensemble_tells_in_what_its_members_differ_from_now() -> None:
    together = Ensemble(name="both", members=("a", "b_x"))
    of = replace(schedule(WITH_VAL), ensembles=(together,))
    refs = [replace(snapshot(of, name, 4), environment=now(of)) for name in together.members]
    assert promise_of_ensemble(of, together, refs, CPU, 2) is None
    refs[1] = replace(refs[1], environment=now(of) | {"threads": "77"})
    note = promise_of_ensemble(of, together, refs, CPU, 2)
    assert note is not None and note.warning
    assert (
        note.text.startswith("ensemble both is EQUIVALENT, not BIT-EXACT") and note.text.count("threads: 77 -> ") == 1
    )


def test_what_onednn_is_held_to_is_part_of_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    free = environment(CPU, 1, "solo")["instruction set"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "sse41")
    assert environment(CPU, 1, "solo")["instruction set"] == f"{free}, oneDNN at most SSE41"


def test_the_images_of_an_update_are_the_same_whoever_computes_them() -> None:
    """Eight device batches of four: any number of workers takes them all, once each, in runs that follow one another."""
    asked = []
    for workers in range(1, 9):
        shares = []
        for run in runs_of(8, workers):
            loop = SimpleNamespace(max_iter=5, batch_size=32, start_position=96, run=run)
            shares.append(list(requests(loop, 2, 4)))  # type: ignore[arg-type]
        updates = []
        for i in range(3):
            each = [[r for r in share if 96 + (2 + i) * 32 <= r[0] < 96 + (3 + i) * 32] for share in shares]
            updates.append([request for share in each for request in share])
        asked.append(updates)
    assert all(updates == asked[0] for updates in asked)
    assert asked[0][0] == [(160 + 4 * k, 4) for k in range(8)]


@pytest.mark.slow
def test_a_run_in_another_environment_says_so_for_what_is_left_to_do(tmp_path: Path) -> None:
    """Another instruction set: of an evaluation that is missing, and of a stage that starts in the new life."""
    tiny.make_data(tmp_path / "data")
    of = small.make_schedule(tmp_path / "schedule", tmp_path / "data")
    out = tmp_path / "out"
    first = small.run(of, out, "--until", "cyc1", timeout=600)
    assert first.returncode == 0, first.stderr
    next((out / "results").glob("cyc1-*")).unlink()
    lower = {**os.environ, "OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    refused = small.run(of, out, "--require-bit-exact", "--threads", 2, timeout=600)
    assert refused.returncode == 78 and "is EQUIVALENT" in refused.stderr and "threads: 1 -> 2" in refused.stderr, (
        refused.stderr
    )
    done = small.run(of, out, "--only", "collapse", env=lower, timeout=600)
    assert done.returncode == 0, done.stderr
    has = torch.backends.cpu.get_cpu_capability()
    for what in ("the evaluation of cyc1", "resume"):
        if has != "DEFAULT":  # a processor that has nothing else
            assert f"warning: {what} is EQUIVALENT, not BIT-EXACT: instruction set: {has} -> DEFAULT" in done.stdout
