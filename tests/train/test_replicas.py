"""Stages with `sync_param`: what replicas come to, for any number of workers, and over interruptions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_help import SOLVER, ConvNet, Linear, Threads, assert_same, cut, dataset, started, tensors, updates
from facade import (
    Determinism,
    Iterated,
    NotFinite,
    Outer,
    ParamRule,
    Precision,
    Sync,
    SyncMethod,
    Tested,
    TrainState,
    recipe,
)
from nan_help import lives, make_data, make_schedule
from safetensors.numpy import load_file

from stagerun.comm import SoloComm, runs_of
from stagerun.schedule import make_knobs

ELASTIC = Determinism.ELASTIC
LOCAL = Sync(method=SyncMethod.LOCAL, replicas=4, period=1, start=recipe.SyncStart.STAGE_START)
PLAIN_SGD = replace(SOLVER, momentum=0.0)


def trained(solver, model, iterations, comm=None, determinism=ELASTIC) -> TrainState:
    batches = [dataset(8, seed=i) for i in range(iterations)]
    return updates(model, solver, batches, comm or SoloComm(), determinism, knobs=make_knobs(solver))[0]


# -- algebra


def test_meeting_after_every_plain_update_is_averaging_gradients():
    """The mean of w - r*g_i is w - r * (mean of g_i), and weight decay is linear too."""
    local = trained(replace(PLAIN_SGD, sync=LOCAL), Linear(), 5)
    assert_same(tensors(local), tensors(trained(PLAIN_SGD, Linear(), 5)), 1e-12)
    apart = trained(replace(PLAIN_SGD, sync=replace(LOCAL, period=5)), Linear(), 5)
    assert (tensors(apart)["fc.weight"] - tensors(local)["fc.weight"]).abs().max() > 1e-6


@pytest.mark.parametrize("determinism", Determinism)
def test_one_replica_is_training_without_replicas(determinism):
    one = replace(SOLVER, sync=replace(LOCAL, replicas=1, period=2))
    plain = tensors(trained(SOLVER, ConvNet(), 4, determinism=determinism))
    assert_same(tensors(trained(one, ConvNet(), 4, determinism=determinism)), plain)


def test_between_synchronisations_each_replica_trains_on_its_own_images():
    """Against replicas that are trained one by one, each as a whole job on its part of the batch."""
    solver = replace(SOLVER, sync=replace(LOCAL, replicas=2, period=5))
    together = trained(solver, ConvNet(), 3)
    alone = []
    for r in range(2):
        part, own = replace(SOLVER, batch_size=4), [cut(dataset(8, seed=i), 4 * r, 4 * r + 4) for i in range(3)]
        alone.append(tensors(updates(ConvNet(), part, own, SoloComm(), ELASTIC, knobs=make_knobs(part))[0]))
    expected = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    counts = {name: t for name, t in alone[0].items() if not t.is_floating_point()}
    assert_same(tensors(together), expected | counts, 1e-15)
    for r, kept in together.exchange.kept.items():  # which show has left as they were
        assert_same({name: kept[name.removeprefix("V ")] for name in alone[r]}, alone[r])


@pytest.mark.parametrize("kind", ["SGD", "Nesterov"])
def test_the_outer_update_is_its_formula(kind):
    outer, period = Outer(type=kind, base_lr=0.7, momentum=0.9), 2
    sync = replace(LOCAL, method=SyncMethod.DILOCO, period=period, outer=outer)
    state = trained(replace(PLAIN_SGD, sync=sync), Linear(), 4)

    # From replicas that are trained one by one, each from the common weights on.
    common = {name: tensor.double() for name, tensor in Linear().state_dict().items()}
    velocity, part = dict.fromkeys(common, 0.0), replace(PLAIN_SGD, batch_size=2)
    for first in range(0, 4, period):
        replicas = []
        for r in range(4):
            own = [cut(dataset(8, seed=i), 2 * r, 2 * r + 2) for i in range(first, first + period)]
            model = Linear().double()
            model.load_state_dict(common)
            replicas.append(tensors(updates(model, part, own, SoloComm(), ELASTIC, knobs=make_knobs(part))[0]))
        for name in common:
            d = common[name] - sum(one[name] for one in replicas) / 4
            velocity[name] = 0.9 * velocity[name] + d
            common[name] = common[name] - 0.7 * (velocity[name] if kind == "SGD" else d + 0.9 * velocity[name])
    assert_same(common, {name: tensors(state)[name] for name in common}, 1e-12)


def test_what_no_update_moves_is_no_replicas_own():
    """Frozen by the network itself, by `lr_mult: 0` and by `freeze`; with FP64 an average of equal numbers may be another one."""
    model = ConvNet()
    model.__dict__["frozen_by_network"] = frozenset({"conv1.weight"})
    rules = (ParamRule(name="fc.bias", lr_mult=0.0),)
    sync = replace(LOCAL, replicas=3, period=2)
    solver = replace(SOLVER, batch_size=6, device_batch_size=2, param=rules, freeze=("bn1*",), sync=sync)
    still = {"conv1.weight", "fc.bias", "bn1.weight", "bn1.running_mean"}
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = trained(solver, model, 4)
    assert not still & state.exchange.apart.keys()
    assert all(torch.equal(before[name], state.model.state_dict()[name].to(before[name])) for name in still)
    assert not torch.equal(before["conv2.weight"], state.model.conv2.weight.to(before["conv2.weight"]))


# -- any number of workers


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(("replicas", "workers"), [(3, 1), (3, 2), (5, 3), (6, 3)])
def test_the_average_of_equal_replicas_is_each_of_them_and_of_others_is_rounded_once(replicas, workers, equal):
    """Of tensors that are too many for one message."""
    sync = replace(LOCAL, replicas=replicas, period=9)
    solver = replace(SOLVER, precision=Precision.FP32, batch_size=2 * replicas, sync=sync)
    batch = dataset(2 * replicas, size=700)
    if equal:
        batch.images[:] = np.tile(batch.images[:2], (replicas, 1, 1, 1))
        batch.labels[:] = np.tile(batch.labels[:2], replicas)

    def work(comm):
        state = updates(Linear(700 * 700), solver, [batch], comm, ELASTIC)[0]
        return tensors(state), state.exchange.kept

    found = Threads(workers).run(work)
    own = {r: kept for _, each in found for r, kept in each.items()}
    assert len(own) == replicas
    for name in ("fc.weight", "fc.bias"):
        mean = sum(own[r][name].double() for r in range(replicas)).div(replicas).float()
        assert torch.equal(mean, own[0][name]) == equal
        assert all(torch.equal(shown[name], mean) for shown, _ in found)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_the_number_of_workers_changes_no_bit_with_elastic(replicas, workers):
    """There are 4 logical workers; with 3 workers a rank may have parts of two replicas, or the whole of two."""
    sync = replace(LOCAL, replicas=replicas, period=3, momentum=recipe.SyncMomentum.AVERAGE)
    solver = replace(SOLVER, sync=sync, clip_gradients=0.5)
    expected = tensors(trained(solver, ConvNet(), 5))
    for state in Threads(workers).run(lambda comm: trained(solver, ConvNet(), 5, comm)):
        assert_same(tensors(state), expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_iteration_that_one_rank_breaks_off_leaves_all_replicas_as_they_were(workers, last):
    """Before its first device batch, or its last."""
    solver = replace(SOLVER, sync=replace(LOCAL, replicas=2, period=4))

    def work(comm):
        state, own = started(ConvNet(), solver, comm, ELASTIC), len(runs_of(4, comm.size)[comm.rank])

        def late(done: int) -> bool:
            return comm.rank == comm.size - 1 and done == (own - 1) * last

        told = []
        for i, broken_off in ((0, None), (1, late), (1, None), (2, None)):
            batches, knobs = [dataset(8, seed=i)], make_knobs(solver)
            state, (one,) = updates(ConvNet(), solver, batches, comm, ELASTIC, knobs, state, broken_off)
            told.append((one.broken_off, one.stop, state.iter))
        assert told == [(False, False, 1), (True, True, 1), (False, False, 2), (False, False, 3)]
        return tensors(state)

    expected = tensors(trained(solver, ConvNet(), 3))
    for found in Threads(workers).run(work):
        assert_same(found, expected)


# -- whole runs


def snapshots(out: Path) -> dict[tuple[str, str], dict[str, bytes]]:
    """The bytes of all tensors by snapshot and file, whatever attempt it was."""
    return {
        (folder.name.rpartition("-")[0], file.name): {n: t.tobytes() for n, t in load_file(file).items()}
        for folder in sorted((out / "snapshots").iterdir())
        for file in sorted(folder.glob("*.safetensors"))
    }


SYNCS = {
    "local": "method: LOCAL replicas: 2 period: 4",
    "averaged": "method: LOCAL replicas: 4 period: 3 momentum: AVERAGE start: STAGE_START",
    "qsr": "method: LOCAL replicas: 2 rule: QSR period: 2 alpha: 0.1",
    "diloco": "method: DILOCO replicas: 4 period: 4",
}
STAGES = {"main": "max_iter: 10 warmup_iter: 2 snapshot: 2", "after": "max_iter: 2 carry { momentum: KEEP }"}


def schedule(tmp_path: Path, data: Path, sync: str, solver: str = "", **stages: str) -> Path:
    solver = f"sync_param {{ {sync} }} {solver}"
    shared = "determinism: ELASTIC keep_snapshots: 100"
    return make_schedule(tmp_path / "s", data, solver, shared=shared, **(stages or STAGES))


@pytest.mark.long
@pytest.mark.parametrize("sync", SYNCS)
def test_a_run_that_is_stopped_and_killed_between_synchronisations_ends_in_the_same_bits(tmp_path, few, sync):
    folder = schedule(tmp_path, few, SYNCS[sync])
    whole = lives(folder, tmp_path / "whole")
    lives(folder, tmp_path / "parts", 2, stop_after=3)
    lives(folder, tmp_path / "parts", 4, kill_after=4)
    lives(folder, tmp_path / "parts", 3)
    assert len([e for e in whole if isinstance(e, Iterated)]) == 12
    a, b = snapshots(tmp_path / "whole"), snapshots(tmp_path / "parts")
    assert a == {place: b[place] for place in a}  # and those where it was stopped
    files = {place for place, file in a if file == "replicas.safetensors"}
    first = 2 if sync == "averaged" else 4
    assert files == {f"main-{i:08}" for i in range(first, 10, 2)}


@pytest.mark.long
def test_an_evaluation_is_of_the_average_and_changes_no_replica(tmp_path, few):
    """Whoever holds what, and whether a snapshot has made the average before."""

    def tested(workers: int, changes: str) -> tuple[list[tuple[int, float]], dict[str, bytes]]:
        here = tmp_path / changes / str(workers)
        folder = schedule(here, few, SYNCS["local"], main=f"max_iter: 8 {changes}")
        text = (folder / "schedule.prototxt").read_text()
        val = f'val {{ source: "{few}" images: 64 }} shuffle: false'
        (folder / "schedule.prototxt").write_text(text.replace("shuffle: false", val))
        told = [(e.iter, e.loss) for e in lives(folder, here / "out", workers) if isinstance(e, Tested)]
        return told, snapshots(here / "out")[("main-00000008", "model.safetensors")]

    one, last = tested(1, "test_interval: 3 snapshot: 0")
    assert [iter for iter, _ in one] == [3, 6, 8]
    assert tested(4, "test_interval: 3 snapshot: 3") == (one, last)
    assert tested(2, "snapshot: 0")[1] == last


@pytest.mark.long
@pytest.mark.parametrize(("on_nan", "workers"), [("SKIP", 2), ("ROLLBACK", 1)])
def test_where_one_replica_fails_all_are_left_as_they_were(tmp_path, workers, on_nan):
    data = make_data(tmp_path / "lmdb", 8 * 5 + 1)
    folder = schedule(tmp_path, data, SYNCS["local"], solver=f"on_nan: {on_nan}", main="max_iter: 10 snapshot: 2")
    failed = [e for e in lives(folder, tmp_path / "out", workers) if isinstance(e, NotFinite)]
    assert [(e.iter, e.done) for e in failed] == [(5, on_nan)] and "of replica 0 " in failed[0].what
    kept = snapshots(tmp_path / "out")
    if on_nan == "SKIP":
        lives(folder, tmp_path / "stopped", 3 - workers, stop_after=6)
        lives(folder, tmp_path / "stopped", workers)
        stopped = snapshots(tmp_path / "stopped")
        assert kept[("main-00000010", "model.safetensors")] == stopped[("main-00000010", "model.safetensors")]
