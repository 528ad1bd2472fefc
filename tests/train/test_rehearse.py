"""`stagerun rehearse`: that it trains everything and leaves nothing but its figures; turns of `--workers 1,2,4`; `--find-lr`. Mistakes:
tests/cases/rehearse.txt, rehearse_workers.txt."""

import itertools
import json
import math
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import contract
import processes
import pytest
import small
from engine_help import CPU, SOLVER, ConvNet, assert_same, tensors
from facade import Determinism, Iterated, cost_key, make_state, rehearsal, spans, trials
from nan_help import make_data, make_schedule
from test_engine_loop import device_batches, go, short, stage_loop
from test_plan import schedule

import stagerun
from stagerun import language
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.loop import timed_train
from stagerun.language import load
from stagerun.schedule import make_knobs, parting, synchronisations

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


def test_a_rehearsal_parts_replicas_though_it_is_shorter_than_their_warm_up(tmp_path):
    """Two replicas of a worker are two passes of an iteration."""
    sync = "sync_param { method: LOCAL replicas: 2 period: 64 }"
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


def turn(round: int, workers: int, step: float, wait: float = 0.0) -> trials.Turn:
    """`step` of the slowest rank."""
    parts = {spans.DATA: 0.5, spans.FORWARD: 1.0, spans.BACKWARD: 2.0, spans.WAIT: wait, spans.UPDATE: 0.5}
    return trials.Turn(round, workers, step, parts)


TURNS = [
    turn(0, 1, 2.0),
    turn(0, 2, 1.25, 1.0),
    turn(1, 2, 2.5, 1.0),  # all is half as fast in this round
    turn(1, 1, 4.0),
    turn(2, 1, 2.0),
    turn(2, 2, 1.0, 1.0),
]


def test_a_machine_that_is_slower_in_one_round_changes_no_efficiency():
    one, two = trials.rows(TURNS, 100)
    speeds = "workers", "images_per_second", "low", "high", "efficiency"
    assert [one[name] for name in speeds] == [1, 50, 25, 50, 1]
    assert [two[name] for name in speeds] == [2, 80, 40, 100, pytest.approx(4 / 2.5 / 2)]
    shares = "computing", "communicating", "waiting"
    assert [one[name] for name in shares] == [3.5 / 4, 0, 0.5 / 4]
    assert [two[name] for name in shares] == [3.5 / 5, 1 / 5, 0.5 / 5]


# -- the command


@pytest.mark.process
def test_a_rehearsal_goes_through_everything_and_plan_knows_its_figures(base, tmp_path):
    out = tmp_path / "out"
    done = small.stagerun("rehearse", base / "schedule", "--out", out, "--nproc", 2, "--threads", 1, "--iters", 4)
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "early: iterations 0 to 3, from init-00000004-a0001" in said
    assert "disk: " in said and "memory: " in said and "RUN OUT" not in said
    assert all(f"{stage}: evaluated" in said for stage in ("init", "cyc1", "collapse", "early"))
    assert said.count("one device batch per worker and iteration was run") == 1  # 4 device batches, 2 workers
    assert [p.name for p in out.iterdir()] == ["rehearsal.json"]
    planned = small.stagerun("plan", base / "schedule", "--out", out).stdout
    table = said[said.index("left with 2 workers, as rehearsed on") :].partition("\n\n")[2].partition("\n\n")[0]
    assert "collapse" in table and table in planned
    changed = small.stagerun("plan", base / "schedule", "--out", out, "--set", "early.device_batch_size=8").stdout
    assert "stage early was left out of the rehearsal of" in changed and "or has changed since" in changed


@pytest.mark.process
def test_an_interrupted_rehearsal_leaves_nothing_and_is_not_a_bug(base, tmp_path):
    out = tmp_path / "out"
    endless = ["--set", "init.max_iter=1000000", "--set", "init.lr_iter=1000000"]
    words = [str(w) for w in ["rehearse", base / "schedule", "--out", out, "--threads", 1, *endless]]
    run = processes.Run([*words, "--iters", "1000000"]).start()
    while not list(out.glob(".rehearsal-*/all/snapshots")):
        assert run.process.poll() is None
        time.sleep(0.1)
    run.process.send_signal(signal.SIGINT)
    code, said = run.wait()
    assert code == 130 and said.endswith("interrupted: a rehearsal keeps nothing\n"), said
    assert "SIGINT: stopping " in said and "which leaves nothing" in said
    assert not list(out.iterdir())


# -- --find-lr


def find(schedule: Path, stage: str, out: Path, first: float, last: float, iters: int, *more: object) -> dict[str, Any]:
    words = ["rehearse", schedule, "--find-lr", stage, "--first-rate", first, "--last-rate", last, "--iters", iters]
    done = contract.stagerun([*words, "--out", out, *more, "--nproc", 1, "--threads", 1, "--json"], out.parent)
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
    words = ["rehearse", base / "schedule", "--find-lr", "cyc1", "--out", tmp_path / "none", "--nproc", 1]
    done = contract.stagerun(words, tmp_path)
    assert done.exit_code == 64 and "has no usable snapshot of that" in done.output
    assert list(tmp_path.iterdir()) == []


# -- its suggestion

Point, following, suggestion = trials.Point, trials.following, trials.suggestion


def made(losses: list[float]) -> list[trials.Point]:
    """Points with these smoothed losses, at rates 1e-5, 1e-4.9 and so on."""
    return [Point(10 ** (-5 + i / 10), loss, loss) for i, loss in enumerate(losses)]


def test_the_smoothed_loss_is_the_mean_with_weights_that_fade():
    points: list[trials.Point] = []
    for loss in (losses := [3.0, 1.0, 2.0]):
        points.append(following(points, 0.1, loss))
    weights = [0.98**2, 0.98, 1.0]
    expected = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
    assert math.isclose(points[-1].smoothed, expected)
    assert points[0].smoothed == pytest.approx(3.0)


def test_the_steepest_fall_is_sought_before_the_lowest_loss():
    # Flat, a slope, a steeper one, the lowest at 18, then up, and down from there more steeply than ever.
    losses = [2.0] * 10 + [1.9, 1.8, 1.5, 1.2, 1.1, 1.05, 1.03, 1.01, 1.0, 1.2, 3.0, 1.5, 1.2] + [1.3] * 5
    steepest, tenth, doubt = suggestion(made(losses), len(losses))
    assert steepest in (pytest.approx(10**-3.9), pytest.approx(10**-3.8))  # 1.8 -> 1.5 -> 1.2
    assert tenth == pytest.approx(10 ** (-5 + 1.8) / 10) and doubt == ""


def test_doubts_about_a_sweep_are_said():
    falling, rising = [2.0 - i / 100 for i in range(60)], [1.0 + i / 100 for i in range(60)]
    *_, doubt = suggestion(made(falling), 60)
    assert doubt == "the loss was still falling at the last rate: take a larger --last-rate"
    assert suggestion(made(rising), 60) == (
        None, None, "the loss never fell: take a smaller --first-rate, or more --iters"
    )  # fmt: skip
    steepest, tenth, doubt = suggestion(made(falling[:9]), 60)
    assert steepest is tenth is None and doubt.startswith("9 iterations gave too little for a suggestion")


@pytest.mark.parametrize("iterations, fall, told", [(30, 0.0, False), (30, 0.05, False), (200, 0.5, True)])
def test_a_fall_that_may_be_chance_suggests_nothing(iterations, fall, told):
    drawn, points = random.Random(1), list[Point]()
    for i in range(iterations):
        x = i / iterations
        loss = 2.3 - fall * (x > 0.5) + 2 * (x > 0.8) + drawn.gauss(0, 0.1)
        points.append(following(points, 1e-7 * 1e8 ** (i / (iterations - 1)), loss))
    steepest, tenth, doubt = suggestion(points, iterations)
    assert (steepest is not None) == (tenth is not None) == told
    assert bool(doubt) != told and (told or "by no more than chance" in doubt)
