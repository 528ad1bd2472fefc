"""`stagerun rehearse`: that it goes through everything, leaves nothing but its figures, and what follows from those; turns of
`--workers 1,2,4`; `--find-lr`. Mistakes: tests/cases/rehearse.txt, rehearse_workers.txt."""

import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import contract
import processes
import pytest
import small
from engine_help import CPU, SOLVER, ConvNet, assert_same, tensors
from facade import Determinism, Inventory, Iterated, Schedule, cost_key, make_state, rehearsal, spans
from nan_help import make_data, make_schedule
from test_engine_loop import device_batches, go, short, stage_loop
from test_plan import schedule

import stagerun
from stagerun import language
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.timed import timed_train
from stagerun.language import load
from stagerun.plan import make_plan
from stagerun.plan.rehearsal import Cost, Figures, snapshots_on_disk
from stagerun.schedule import make_knobs, parting, synchronisations
from stagerun.tools.rehearse.estimate import Room, estimate, needs, render_needs
from stagerun.tools.rehearse.measure import LEAST_ITERS, first_life
from stagerun.tools.rehearse.scaling import Share, Turn, rows

TREE = schedule(
    shared="""
model { name: "resnet_small" num_classes: 10 }
data { train { source: "/d/train" images: 1000 } val { source: "/d/val" images: 1001 } }
solver { batch_size: 100 device_batch_size: 25 test_batch_size: 100 snapshot: 8 test_interval: 6 test_iter: 3 }
stage { name: "trunk" }
stage { name: "long" }
stage { name: "collapse" from: "long" }
stage { name: "early" from: "trunk" }
"""
)


def figures(of: Schedule, **changes: object) -> Figures:
    """Round numbers for every kind of stage of a schedule."""
    keys = {cost_key(of, stage): stage.solver for stage in of.stages}
    costs = tuple(
        Cost(
            key=key, stages=tuple(s.name for s in of.stages if cost_key(of, s) == key), iterations=20,
            device_batch_size=solver.device_batch_size, pass_seconds=0.1, update_seconds=0.05,
            test_batch_size=solver.test_batch_size, test_seconds=0.5, start_seconds=2.0,
        )
        for key, solver in keys.items()
    )  # fmt: skip
    plain = Figures(
        schedule=of.name, date="2026-11-21 10:00", host="node1", device="cpu", torch="2.13.0", workers=2, local_workers=2,
        threads=1, synthetic="", costs=costs, snapshot_bytes=1000, snapshot_seconds=3.0, blocked_seconds=0.25,
        memory_bytes=5000, gpu_memory_bytes=0, log_bytes=10.0,
    )  # fmt: skip
    return replace(plain, **changes)


ROOM = Room(
    out="out/x", out_free=10**6, memory=10**6, gpu_memory=None, scratch=None, scratch_free=None, data_bytes=None
)

# -- the schedule cut down


def test_a_rehearsal_is_each_stage_with_one_device_batch_per_worker_and_the_learning_rate_of_that_batch():
    short = rehearsal(TREE, 7, 2, None)
    for stage, real in zip(short.stages, TREE.stages, strict=True):
        assert stage.solver.max_iter == min(7, real.solver.max_iter)
        assert (stage.solver.batch_size, stage.solver.device_batch_size, stage.solver.logical_workers) == (50, 25, 2)
        assert stage.solver.base_lr == pytest.approx(real.solver.base_lr / 2)
        assert (stage.parent, stage.solver.transform) == (real.parent, real.solver.transform)
    smaller = rehearsal(TREE, 7, 3, 4).stages[0].solver
    assert (smaller.batch_size, smaller.test_batch_size) == (12, 4)
    assert rehearsal(TREE.with_data(lambda data: replace(data, scratch="/tmp")), 5, 1, None).data.scratch is None


@pytest.mark.parametrize("method", ["LOCAL", pytest.param("DILOCO", marks=pytest.mark.long)])
def test_a_rehearsal_parts_replicas_though_it_is_shorter_than_their_warm_up(tmp_path, method):
    """Two replicas of a worker are two passes of an iteration."""
    sync = f"sync_param {{ method: {method} replicas: 2 period: 64 }}"
    data, long = make_data(tmp_path / "lmdb"), "max_iter: 100 warmup_iter: 50"
    folder = make_schedule(tmp_path / "s", data, sync, main=long)
    of, plain = (load(str(one)) for one in (folder, make_schedule(tmp_path / "plain", data, main=long)))
    for workers, batches in ((1, 2), (2, 2), (3, 6)):
        short = rehearsal(of, 5, workers, None).stages[0].solver
        assert parting(short) == 0 and synchronisations(short) == (5,) and short.logical_workers == batches
    words = ["rehearse", folder, "--iters", 6, "--nproc", 1, "--threads", 1, "--out", tmp_path / "out", "--json"]
    done = contract.stagerun(words, tmp_path)
    assert done.exit_code == 0, done.output
    (cost,) = json.loads(done.stdout)["figures"]["costs"]
    assert cost["key"] == cost_key(of, of.stages[0]) != cost_key(plain, plain.stages[0])


@pytest.mark.parametrize("iters", [None, *range(1, 15)])
def test_a_rehearsal_trains_no_piece_of_its_first_stage_again(iters):
    """What starts from its midst finds a snapshot there, or the second life comes by that place."""
    for max_iter, point in itertools.product(range(1, 16), range(1, 15)):
        if point >= max_iter:
            continue
        trunk = replace(TREE.stages[0], solver=replace(TREE.stages[0].solver, max_iter=max_iter))
        of = replace(TREE, stages=(trunk, replace(TREE.stages[3], parent_iter=point)))
        stopped, whole = first_life(iters, max_iter)
        if not stopped:
            continue
        assert stopped < rehearsal(of, whole, 1, None).stages[0].solver.max_iter
        (before,) = rehearsal(of, whole, 1, None).branch_points("trunk")
        for second in [iters] if iters is not None else range(LEAST_ITERS, 20):
            later = rehearsal(of, second, 1, None).branch_points("trunk")
            assert all(place >= stopped or place == before for place in later), (max_iter, point, second)


# -- rates

RATED = """name: "r" model { name: "resnet_small" num_classes: 10 } data { train { source: "t" images: 64 } }
solver { batch_size: 16 device_batch_size: 2 } stage { name: "a" } stage { name: "b" }
"""
STARTS = ("", "warmup_iter: 100", *(f"warmup_iter: {n} decay_from: WARMUP_END" for n in (2, 40)))


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_a_rehearsal_has_a_rate_everywhere(iters):
    shapes = """base_lr: 1 max_iter: 100 power: 1.5 gamma: 0.5 lr_iter: 300 stepsize: 5 stepvalue: 3 end_lr: 0.5
    plateau_winsize: 1 knot {{ iter: 0 factor: 0 }} knot {{ iter: 50 factor: 1 }} policy_start_iter: 1 {} lr_policy: "{}" """
    for policy in language.ranges.CHOICES["Solver.lr_policy"]:
        for start in STARTS:
            made = shapes.format(start, policy)
            whole = language.read({"schedule.prototxt": RATED, "a.prototxt": made, "b.prototxt": made}, "/x")
            for stage in rehearsal(whole, iters, 1, 1).stages:
                knobs = make_knobs(stage.solver)
                seen = [knobs(i) for i in range(stage.solver.max_iter)]
                assert all(0 <= k.lr <= 1 / 16 and 0 <= k.momentum < 1 and k.weight_decay >= 0 for k in seen)


# -- what follows from the figures


def test_the_estimate_is_passes_updates_tests_snapshots_and_starts():
    plan = make_plan(TREE, Inventory())
    long = estimate(plan, figures(TREE), workers=2)["long"]
    assert long is not None
    assert (long.passes, long.iteration) == (2, pytest.approx(2 * 0.1 + 0.05))  # 4 device batches on 2 workers
    assert long.training == pytest.approx(30 * 0.25)
    # 1001 images are 11 batches, 6 for the busier worker; inside the stage, at 6, 12, 18, 24, 3 batches are 2 for it.
    assert long.tests == pytest.approx(0.5 * (6 + 4 * 2))
    assert long.snapshots == pytest.approx(3.0 + 3 * 0.25)  # at 8, 16, 24, and the end
    assert long.total == pytest.approx(long.training + long.tests + long.snapshots + 2.0)
    assert long.images_per_second == pytest.approx(400)
    assert estimate(plan, figures(TREE), workers=3)["long"].passes == 2
    assert estimate(plan, figures(TREE), workers=4)["long"].passes == 1


def test_what_would_run_out_is_said_first():
    plan = make_plan(TREE, Inventory())
    # trunk 20: at 8, 16 and the end; long 30: 8, 16, 24; collapse 10: 8; early: none. Three are kept, the end, and one in writing.
    assert snapshots_on_disk(TREE) == (3 + 1) + (3 + 1) + (2 + 1) + (1 + 1) + 1
    enough = render_needs(needs(plan, figures(TREE), ROOM))
    assert "RUN OUT" not in enough and enough.startswith("disk: 14.7 kB in out/x (14 snapshots of 1.0 kB at most")
    tight = replace(ROOM, out_free=14_000, memory=9_999, gpu_memory=10, scratch="/nvme", scratch_free=5, data_bytes=6)
    lines = render_needs(needs(plan, figures(TREE, gpu_memory_bytes=11), tight)).splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["WOULD RUN OUT", f" {what}"] for what in ("disk", "memory", "GPU memory", "scratch")
    ]
    reserved = replace(ROOM, scratch="/nvme", scratch_free=10, data_bytes=6, scratch_reserve=5)
    said = "WOULD RUN OUT: scratch: the images (6 B) go to /nvme of each node, 10 B free, of which 5 B stay so"
    assert said in render_needs(needs(plan, figures(TREE), reserved))
    unknown = render_needs(needs(plan, figures(TREE), replace(ROOM, scratch="/nvme")))
    assert "not known: scratch: the images (not on this machine) go to /nvme" in unknown


# -- where an iteration's time goes, and turns of --workers 1,2,4

# One iteration: the second reduction begins within the first and ends after backward.
ONE = [
    (spans.DATA, 0, 1),
    (spans.FORWARD, 1, 3),
    (spans.BACKWARD, 3, 8),
    (spans.REDUCTION, 4, 6),
    (spans.REDUCTION, 5, 9),
    (spans.WAIT, 8, 9),
    (spans.UPDATE, 9, 10),
]


def test_what_is_under_way_at_one_time_counts_once():
    one = [spans.Span(name, begun, ended, 7, 0, "a") for name, begun, ended in ONE]
    lay = spans.overlap(one)
    assert (lay.iterations, lay.sending, lay.hidden) == (1, 5, 4)
    seconds = {spans.DATA: 1, spans.FORWARD: 2, spans.BACKWARD: 5, spans.WAIT: 1, spans.UPDATE: 1}
    assert spans.seconds_of(one) == seconds


def test_a_loop_that_is_looked_at_trains_to_the_same_bits_and_every_second_has_its_part():
    plain, state, loop = make_state(ConvNet(), SOLVER, CPU), make_state(ConvNet(), SOLVER, CPU), stage_loop()
    events = go(loop, plain)
    found = spans.Spans(map(float, itertools.count()).__next__)  # each look is a second later
    reducer = make_reducer(Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 4)
    timed = list(timed_train(loop, state, device_batches(loop), reducer, lambda: False, lambda: None, found))
    assert short(timed) == short(events)
    assert_same(tensors(state), tensors(plain))
    assert {(s.iter, s.stage) for s in found.found} == {(i, "cyc1") for i in range(9)}
    each = [spans.DATA, spans.FORWARD, spans.BACKWARD] * len(loop.logical_workers)
    assert [s.name for s in found.found if s.iter == 4] == [*each, spans.WAIT, spans.UPDATE]
    assert all(a.ended <= b.started for a, b in itertools.pairwise(found.found))
    assert set(spans.seconds_of(found.found)) == set(spans.PARTS)


def turn(round: int, workers: int, seconds: Sequence[float], wait: float = 0.0) -> Turn:
    parts = {spans.DATA: 0.5, spans.FORWARD: 1.0, spans.BACKWARD: 2.0, spans.WAIT: wait, spans.UPDATE: 0.5}
    shares = tuple(Share(f"n{i // 2}", s, parts, 2 * wait, wait) for i, s in enumerate(seconds))
    return Turn(round=round, workers=workers, iterations=2, shares=shares)


TURNS = [
    turn(0, 1, [4.0]),
    turn(0, 2, [2.5, 2.4], 1.0),
    turn(1, 2, [5.0, 4.0], 1.0),  # all is half as fast in this round
    turn(1, 1, [8.0]),
    turn(2, 1, [4.0]),
    turn(2, 2, [2.0, 2.0], 1.0),
]


def test_a_machine_that_is_slower_in_one_round_changes_no_efficiency():
    one, two = rows(TURNS, 100)
    assert (one.workers, one.images_per_second, one.low, one.high, one.efficiency) == (1, 50, 25, 50, 1)
    assert (two.images_per_second, two.low, two.high) == (80, 40, 100)  # of the slower rank
    assert two.efficiency == pytest.approx(4 / 2.5 / 2)
    assert (one.computing, one.communicating, one.waiting) == (3.5 / 4, 0, 0.5 / 4)
    assert (two.computing, two.communicating, two.waiting) == (3.5 / 5, 1 / 5, 0.5 / 5)
    assert (two.sending, two.hidden) == (1.0, 0.5)


# -- the command


@pytest.mark.process
def test_a_rehearsal_goes_through_everything_and_plan_knows_its_figures(base, tmp_path):
    out = tmp_path / "out"
    done = small.stagerun("rehearse", base / "schedule", "--out", out, "--nproc", 2, "--threads", 1, "--iters", 4)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "init: stopped and saved after 2, to be resumed" in said
    assert "init: iterations 2 to 4, from init-00000002-a0001" in said
    assert "early: iterations 0 to 3, from init-00000004-a0002" in said
    assert all(f"{stage}: evaluated" in said for stage in ("init", "cyc1", "collapse", "early"))
    assert said.count("one device batch per worker and iteration was run") == 1  # 4 device batches, 2 workers
    assert [p.name for p in out.iterdir()] == ["rehearsal.json"]
    planned = small.stagerun("plan", base / "schedule", "--out", out).stdout
    assert "left with 2 workers, as rehearsed on" in planned
    changed = small.stagerun("plan", base / "schedule", "--out", out, "--set", "early.device_batch_size=8").stdout
    assert "stage early was left out of the rehearsal of" in changed and "or has changed since" in changed


@pytest.mark.process
def test_an_interrupted_rehearsal_leaves_nothing_and_is_not_a_bug(base, tmp_path):
    out = tmp_path / "out"
    endless = ["--set", "init.max_iter=1000000", "--set", "init.lr_iter=1000000"]
    words = [str(w) for w in ["rehearse", base / "schedule", "--out", out, "--threads", 1, *endless]]
    run = processes.Run([*words, "--iters", "1000000"]).start()
    small.wait_for(out / ".rehearsal" / "out" / "snapshots", run)
    second = small.stagerun(*words)
    assert second.returncode == 73, "one at a time"
    run.process.send_signal(signal.SIGINT)
    code, said = run.wait()
    assert code == 130 and said.endswith("interrupted: a rehearsal keeps nothing\n"), said
    assert "SIGINT: stopping after this iteration, which leaves nothing" in said
    assert not list(out.iterdir())


# -- --find-lr


def find(schedule: Path, stage: str, out: Path, first: float, last: float, iters: int, *more: object) -> dict[str, Any]:
    words = [
        "rehearse",
        schedule,
        "--find-lr",
        stage,
        "--first-rate",
        first,
        "--last-rate",
        last,
        "--iters",
        iters,
        "--out",
        out,
    ]
    done = contract.stagerun([*words, *more, "--nproc", 1, "--threads", 1, "--json"], out.parent)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_the_first_loss_of_a_sweep_is_that_of_the_stage(base):
    """The same images, transform and weights: those of the parent's end, though the stage itself is trained, too."""
    iterations: dict[str, list[Iterated]] = {}
    for event in stagerun.run(base / "schedule", base / "out", until="cyc1", threads=1):
        if isinstance(event, Iterated):
            iterations.setdefault(event.stage, []).append(event)
    before = everything(base / "out")
    for stage, start in (("init", "seed"), ("cyc1", "init-00000006-a0001")):
        found = find(base / "schedule", stage, base / "out", 1e-4, 1e-2, 10)
        assert found["start"].startswith(start) and found["ended"] == "" and len(found["points"]) == 10
        assert found["points"][0]["loss"] == iterations[stage][0].loss
        assert [p["lr"] for p in found["points"]] == pytest.approx([1e-4 * 100 ** (i / 9) for i in range(10)])
    assert everything(base / "out") == before


def test_the_same_rate_gives_the_updates_of_the_stage(base, tmp_path):
    words = ("init.lr_policy=fixed", "init.base_lr=0.05", "init.warmup_iter=0", "init.max_iter=10")
    run = stagerun.run(base / "schedule", tmp_path / "out", overrides=words, until="init", threads=1)
    losses = [event.loss for event in run if isinstance(event, Iterated)]
    sets = [word for change in words for word in ("--set", change)]
    found = find(base / "schedule", "init", tmp_path / "none", 0.05, 0.05 * (1 + 1e-9), 10, *sets)
    assert [p["loss"] for p in found["points"]] == pytest.approx(losses, rel=1e-5)


def test_a_sweep_ends_where_it_diverges(base, tmp_path):
    found = find(base / "schedule", "init", tmp_path / "none", 1.0, 1e6, 60)
    assert len(found["points"]) < 60 and ("4 times its lowest" in found["ended"] or "not finite" in found["ended"])
    assert list(tmp_path.iterdir()) == []
