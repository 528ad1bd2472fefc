"""BIT-EXACT or EQUIVALENT, said with each reason wherever something goes on; what of it is refused, and what is recorded for it."""

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import small
import tiny
import torch
from facade import Determinism, Note, ResumeRefused, Schedule, SnapshotRef, Stage, environment_of, same_set
from test_plan_trees import SCHEDULE, inventory, on_disk, schedule, snapshot

from stagerun.base.snapshots import TRAINING_SET
from stagerun.engine.device import RECORDED_SINCE, differences, environment
from stagerun.plan import Plan, State, make_plan, require_fresh
from stagerun.train.environment import promise, require_exact, require_same

CPU = torch.device("cpu")
TRAIN = 'train { source: "/d/train" images: 1000 }'
WITH_VAL = SCHEDULE.replace(TRAIN, TRAIN + ' val { source: "/d/val" images: 100 }')
NAMES = ["torch", "instruction set", "threads", "workers", "reducer", "processor", "math settings", "image library"]
CHANGES = {**dict.fromkeys([*NAMES, "stagerun"], "77"), "device": "Some GPU"}


def now(of: Schedule) -> dict[str, str]:
    return environment_of(of, of.stages[0], CPU, workers=2)


def plan(of: Schedule, refs: list[SnapshotRef], **changed: str) -> Plan:
    """With these snapshots, as if made in an environment like this one but for what is `changed`."""
    return make_plan(of, inventory([replace(ref, environment=now(of) | changed) for ref in refs]))


def told(of: Schedule, planned: Plan, stage: str, **here: str) -> Note | None:
    """Of a stage, where it is to go on in this environment, but for what is different `here`."""
    (one,) = [s for s in planned.stages if s.stage.name == stage]
    return promise(of, one, now(of) | here)


def inside(of: Schedule) -> list[SnapshotRef]:
    """What is on disk where `main` is to go on."""
    return [snapshot(of, "main", 6)]


def done(of: Schedule) -> list[SnapshotRef]:
    """Where `main` is done and `end` begins."""
    return [ref for place, ref in on_disk(of).items() if place.startswith("main@")]


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "what, stage, refs",
    [("resume", "main", inside), ("resume", "end", done), ("the evaluation of main", "main", done)],
    ids=["inside", "start", "evaluation"],
)
def test_each_reason_is_told_wherever_something_goes_on_and_refused_where_that_is_asked_for(name, what, stage, refs):
    of = schedule(WITH_VAL)
    note = told(of, plan(of, refs(of), **{name: CHANGES[name]}), stage)
    text = f"{what} is EQUIVALENT, not BIT-EXACT: {name}: {CHANGES[name]} -> "
    assert note is not None and note.text.startswith(text) and note.warning
    with pytest.raises(ResumeRefused, match=f"--require-bit-exact: {text}"):
        require_exact(note)


def test_with_all_as_before_it_is_bit_exact_and_a_start_says_nothing():
    of, without = schedule(WITH_VAL), schedule()
    same = "same torch build, processor, instruction set, threads, workers and reducer"
    for refs, what in ((inside(of), "resume"), (done(of), "the evaluation of main")):
        note = told(of, plan(of, refs), "main")
        assert note == Note(text=f"{what} is BIT-EXACT: {same}")
        require_exact(note)
    assert told(of, plan(of, done(of)), "end") is None
    assert told(without, plan(without, done(without), threads="77"), "main") is None, "nothing to evaluate"
    require_exact(None)


def test_a_gpu_is_promised_nothing():
    of = schedule()
    note = told(of, plan(of, inside(of), device="Some GPU"), "main", device="Some GPU")
    assert note is not None and "BIT-EXACT" not in note.text
    with pytest.raises(ResumeRefused, match="were not verified"):
        require_exact(note)


def test_with_elastic_the_number_of_workers_is_no_reason_and_all_others_are():
    of = replace(schedule(), determinism=Determinism.ELASTIC)
    assert "is BIT-EXACT" in told(of, plan(of, inside(of), workers="5"), "main").text
    for name in CHANGES.keys() - {"workers"}:
        text = told(of, plan(of, inside(of), workers="5", **{name: CHANGES[name]}), "main").text
        assert "EQUIVALENT" in text and f"{name}: " in text and "workers" not in text


OLD, NEW = "600 records, sample aa, index bb", "600 records, sample cc, index dd"


@pytest.mark.parametrize(("before", "now_there", "same"), [
    ("600 records, sample aa", OLD, True),  # a side file was made since
    (OLD, "600 records, sample zz, index bb", True),  # the same records, written in another order
    (OLD, "600 records, sample aa, index zz", False),  # a change that the sample doesn't see
    ("600 records, sample aa", NEW, False),
    (OLD, "", None),
])  # fmt: skip
def test_sets_are_compared_by_what_both_know(before, now_there, same):
    assert same_set(before, now_there) is same


def trained_on(of: Schedule, refs: list[SnapshotRef], images: str) -> list[SnapshotRef]:
    """By a version that records its training images, unless they are ''."""
    more = {TRAINING_SET: images} if images else {}
    return [replace(ref, environment=now(of) | more) for ref in refs]


def test_inside_a_stage_other_images_are_a_reason_and_old_snapshots_say_unknown():
    of = replace(schedule(), sets={"/d/train": NEW})
    for images, reason in ((OLD, f"training set: {OLD} -> {NEW}"), ("", f"training set: unknown -> {NEW}")):
        planned = make_plan(of, inventory(trained_on(schedule(), inside(of), images)))
        assert planned.next.state is State.RESUME and planned.next.iter == 6
        assert told(of, planned, "main").text == f"resume is EQUIVALENT, not BIT-EXACT: {reason}"
    sampled = replace(of, sets={"/d/train": "600 records, sample cc"})
    for here, text in ((of, "training images"), (sampled, "training images as far as 32 of them show")):
        planned = make_plan(here, inventory(trained_on(schedule(), inside(of), NEW)))
        assert told(here, planned, "main").text.startswith(f"resume is BIT-EXACT: same torch build, {text}")


def test_a_finished_stage_is_stale_on_other_images_and_an_old_one_never_is():
    of = replace(schedule(), sets={"/d/train": NEW})
    refs = list(on_disk(of).values())
    stale = make_plan(of, inventory(trained_on(schedule(), refs, OLD)))
    assert {s.state for s in stale.stages} == {State.STALE} and stale.next is None
    with pytest.raises(ResumeRefused) as caught:
        require_fresh(stale)
    assert "stage `main` is stale: the training images have changed since it was trained" in caught.value.message
    assert f"  data.train.source {OLD} -> {NEW} (schedule.prototxt:4)" in caught.value.message
    assert "`--redo main " in caught.value.hint
    for images, sets in (("", of.sets), (NEW, of.sets), (OLD, {})):  # the last: on a login node
        plan = make_plan(replace(of, sets=sets), inventory(trained_on(schedule(), refs, images)))
        assert {s.state for s in plan.stages} == {State.DONE}


@pytest.mark.parametrize("midst", ["", NEW], ids=["before it was recorded", "on these images"])
def test_a_stage_that_ended_on_other_images_is_not_trained_again_from_its_midst_unasked(midst):
    of = replace(schedule(), sets={"/d/train": NEW})
    refs = trained_on(schedule(), inside(of), midst) + trained_on(schedule(), [on_disk(of)["main@20"]], OLD)
    main = make_plan(of, inventory(refs)).stages[0]
    assert main.state is State.STALE and "the training images have changed" in main.why


def of_processor(name: str, flags: str) -> dict[str, str]:
    return {"threads": "1", "processor": name, "processor flags": flags, "math settings": "none"}


A, UNKNOWN = of_processor("A (x/1/2)", "avx2"), of_processor("unknown", "unknown")
TORCH = {"torch": "2.13.0", "workers": "2"}
FIXED, ELASTIC, PORTABLE = Determinism.FIXED, Determinism.ELASTIC, Determinism.PORTABLE
COLOURS = {"colour library": "torchvision 0.24, pillow 12.0"}


@pytest.mark.parametrize(("before", "after", "determinism", "reasons"), [
    (of_processor("A (x/1/2)", "avx2 avx512_bf16"), of_processor("A (x/1/2)", "avx2 amx_tile"), FIXED,
     ["processor flags: avx512_bf16 missing, amx_tile added"]),
    (A, of_processor("B (x/1/3)", "avx2"), FIXED,
     ["processor: A (x/1/2) -> B (x/1/3), with the same flags, but libraries look at the model, too"]),
    (A, of_processor("B (y/1/3)", "none"), FIXED, ["processor: A (x/1/2) -> B (y/1/3)", "processor flags: avx2 missing"]),
    (A, UNKNOWN, FIXED, ["processor: A (x/1/2) -> unknown"]),
    (UNKNOWN, UNKNOWN, FIXED, ["processor: unknown -> unknown"]),
    ({"threads": "1"}, A, FIXED, ["math settings, processor, processor flags: unknown, made by a stagerun that didn't record that"]),
    (TORCH, TORCH, FIXED, []),
    (TORCH, TORCH | {"workers": "3"}, FIXED, ["workers: 2 -> 3"]),
    (TORCH, TORCH | {"workers": "3"}, ELASTIC, []),
    (A, of_processor("B (x/1/3)", "avx2"), PORTABLE, []),
    (A | {"threads": "1"}, A | {"threads": "2"}, PORTABLE, ["threads: 1 -> 2"]),
    (TORCH, {"workers": "2"}, ELASTIC, ["torch: 2.13.0 -> none"]),
    # A snapshot of an older stagerun, or of a parent that changes colours; and the other way round.
    (TORCH | COLOURS, TORCH, FIXED, []),
    (TORCH, TORCH | COLOURS, FIXED, []),
    (TORCH | COLOURS, TORCH | {"colour library": "none"}, FIXED, [f"colour library: {COLOURS['colour library']} -> none"]),
])  # fmt: skip
def test_two_environments_differ_by_what_both_recorded(before, after, determinism, reasons):
    assert differences(before, after, determinism) == reasons


# -- a stretch that is trained again for a branch, below which finished stages hang

GONE = ("main@12", "b_y@4")  # `b_x` came from there, and `b_y` is to start there


def left(of: Schedule) -> list[SnapshotRef]:
    return [ref for place, ref in on_disk(of).items() if place not in GONE]


def here(plan: Plan) -> Callable[[Stage], dict[str, str]]:
    return lambda stage: environment_of(plan.schedule, stage, CPU, workers=2)


def refusal(plan: Plan) -> str:
    with pytest.raises(ResumeRefused) as caught:
        require_same(plan, here(plan))
    assert "`--redo b_x` trains these stages again here" in caught.value.hint
    return caught.value.message


def test_what_an_older_snapshot_did_not_record_refuses_nothing():
    of = replace(schedule(), sets={"/d/train": "1000 records, sample aa"})
    before = {name: value for name, value in now(of).items() if name not in RECORDED_SINCE}
    old = [replace(ref, environment=before) for ref in left(of)]
    found = make_plan(of, inventory(old))
    assert found.lost and found.pieces
    require_same(found, here(found))
    other = [replace(ref, environment=before | {"threads": "77"}) for ref in old]
    assert "processor" not in refusal(make_plan(of, inventory(other)))


def test_what_would_make_a_finished_stage_stale_is_named():
    of, changed = schedule(), {"workers": "1", "reducer": "solo", "threads": "77"}
    message = refusal(plan(of, left(of), **changed))
    assert all(f"  {name}: {value} -> " in message for name, value in changed.items())
    elastic = schedule(SCHEDULE + "determinism: ELASTIC\n")
    alone = plan(elastic, left(elastic), workers="1")
    require_same(alone, here(alone))
    assert "  threads: 77 -> " in refusal(plan(elastic, left(elastic), workers="1", threads="77"))


# -- what a run finds


@pytest.mark.process
def test_another_lmdb_between_two_lives_is_seen(tmp_path):
    """Other pixels and labels, as many, at the same path: no life goes on as if nothing had happened."""
    data, out = tmp_path / "data", tmp_path / "out"
    tiny.make_data(data)
    of = small.make_schedule(tmp_path / "schedule", data)
    assert small.run(of, out, "--until", "init").returncode == 0
    shutil.rmtree(data)
    tiny.make_data(data, 800)
    stale = small.run(of, out)
    assert stale.returncode == 78
    assert "stage `init` is stale: the training images have changed since it was trained" in stale.stderr
    assert "stale: the training images" in small.stagerun("plan", of, "--out", out).stdout
    shutil.rmtree(out / "snapshots" / "init-00000006-a0001")  # as if it had been stopped in its midst
    refused = small.run(of, out, "--require-bit-exact")
    assert refused.returncode == 78 and "resume is EQUIVALENT, not BIT-EXACT: training set: " in refused.stderr


def test_what_onednn_is_held_to_is_part_of_the_instruction_set(monkeypatch):
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    free = environment(CPU, 1, "solo")["instruction set"]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "sse41")
    assert environment(CPU, 1, "solo")["instruction set"] == f"{free}, oneDNN at most SSE41"
