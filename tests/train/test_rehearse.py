"""`stagerun rehearse`: that it goes through everything, leaves nothing but its figures, and what follows from those."""

import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import small
import torch
from facade import (
    Compression,
    Event,
    Inventory,
    Iterated,
    Memory,
    Method,
    Outer,
    Schedule,
    Sync,
    Synchronised,
    SyncMethod,
    World,
    cost_key,
    rehearsal,
)
from nan_help import make_data, make_schedule
from test_plan import schedule

from stagerun.comm import SoloComm
from stagerun.language import load
from stagerun.plan import make_plan
from stagerun.plan.estimate import (
    Cost,
    Figures,
    Room,
    estimate,
    mean,
    needs,
    render_needs,
    snapshots_on_disk,
)
from stagerun.schedule import parting, synchronisations
from stagerun.tools.rehearse import measure
from stagerun.tools.rehearse.measure import LEAST_ITERS, first_life

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
    return replace(plain, **changes)  # type: ignore[arg-type]


ROOM = Room(
    out="out/x", out_free=10**6, memory=10**6, gpu_memory=None, scratch=None, scratch_free=None, data_bytes=None
)

# -- the schedule cut down


def test_a_rehearsal_is_each_stage_with_one_device_batch_per_worker_and_the_learning_rate_of_that_batch() -> None:
    short = rehearsal(TREE, 7, 2, None)
    for stage, real in zip(short.stages, TREE.stages, strict=True):
        assert stage.solver.max_iter == min(7, real.solver.max_iter)
        assert (stage.solver.batch_size, stage.solver.device_batch_size, stage.solver.logical_workers) == (50, 25, 2)
        assert stage.solver.base_lr == pytest.approx(real.solver.base_lr / 2)
        assert (stage.parent, stage.solver.transform) == (real.parent, real.solver.transform)
    smaller = rehearsal(TREE, 7, 3, 4).stages[0].solver
    assert (smaller.batch_size, smaller.test_batch_size) == (12, 4)
    assert rehearsal(TREE.with_data(lambda data: replace(data, scratch="/tmp")), 5, 1, None).data.scratch is None


@pytest.mark.parametrize("method", [SyncMethod.LOCAL, pytest.param(SyncMethod.DILOCO, marks=pytest.mark.long)])
def test_a_rehearsal_parts_replicas_though_it_is_shorter_than_their_warm_up(tmp_path: Path, method: SyncMethod) -> None:
    outer = Outer() if method is SyncMethod.DILOCO else None
    sync = Sync(method=method, replicas=2, period=64, outer=outer)
    compress = Compression(method=Method.TOP_K, ratio=0.1, memory=Memory.RESIDUAL, start_iter=30)
    folder = make_schedule(tmp_path / "s", make_data(tmp_path / "lmdb"), main="max_iter: 100 warmup_iter: 50")
    real = load(str(folder), ())
    solver = replace(real.stages[0].solver, sync=sync, compress=compress)
    of = replace(real, stages=(replace(real.stages[0], solver=solver),))
    for workers, batches in ((1, 2), (2, 2), (3, 6)):
        short = rehearsal(of, 5, workers, None).stages[0].solver
        assert parting(short) == 0 and synchronisations(short) == (5,) and short.logical_workers == batches
    seen: list[Event] = []
    figures = measure.rehearse(
        of, measure.Rehearsal(6, None, False), tmp_path / "out", SoloComm(), World(), torch.device("cpu"), lambda: False,
        seen.append,
    )  # fmt: skip
    assert figures is not None and [e.iter for e in seen if isinstance(e, Synchronised)] == [6]
    # Two replicas of a worker are two passes of an iteration.
    (cost,), timed = figures.costs, [e for e in seen if isinstance(e, Iterated) and e.iter not in (1, 4)]
    assert cost.pass_seconds == pytest.approx(mean([e.seconds - e.update_seconds for e in timed]) / 2)
    assert cost.key != cost_key(real, real.stages[0])


@pytest.mark.parametrize("iters", [None, *range(1, 15)])
def test_a_rehearsal_trains_no_piece_of_its_first_stage_again(iters: int | None) -> None:
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


# -- what follows from the figures


def test_the_estimate_is_passes_updates_tests_snapshots_and_starts() -> None:
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
    assert estimate(plan, figures(TREE), workers=3)["long"].passes == 2  # type: ignore[union-attr]
    assert estimate(plan, figures(TREE), workers=4)["long"].passes == 1  # type: ignore[union-attr]


def test_what_would_run_out_is_said_first() -> None:
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


# -- the command


@pytest.mark.process
def test_a_rehearsal_goes_through_everything_and_plan_knows_its_figures(base: Path, tmp_path: Path) -> None:
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
@pytest.mark.slow
def test_synthetic_needs_no_data_and_json_is_one_object(base: Path, tmp_path: Path) -> None:
    nowhere = ["--set", "data.train.source=/no/train", "--set", "data.val.source=/no/val"]
    words = ["rehearse", base / "schedule", *nowhere, "--out", tmp_path / "out", "--threads", 1, "--iters", 2]
    refused = small.stagerun(*words)
    assert refused.returncode == 65 and "/no/train: this machine has no such LMDB" in refused.stderr
    assert "/no/val" in refused.stderr and "hint: `--synthetic`" in refused.stderr
    # Rectangular evaluation needs the side file of the images.
    rectangular = "{crop_size: 24 rectangular: true random_resize_param { min_size: 28 } mean_value: 73 scale: 0.0111}"
    words += ["--set", f"solver.test_transform_param={rectangular}"]
    done = small.stagerun(*words, "--synthetic", "--json", "--workers", 4, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["workers"] == 4 and [s["passes"] for s in record["stages"]] == [1, 1, 1, 1]
    assert all(s["in_all"] > 0 for s in record["stages"])
    assert not list(tmp_path.glob("stagerun-rehearsal-*")), "the made-up images are removed"


@pytest.mark.process
def test_an_interrupted_rehearsal_leaves_nothing_and_is_not_a_bug(base: Path, tmp_path: Path) -> None:
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
