"""`audit_param`: it changes no bit, finds what is wrong and who, and its proofs are those of an uninterrupted run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from nan_help import lives, make_data, make_schedule, same, states_alive, told_of
from processes import content

from stagerun import store
from stagerun.base.errors import ExitCode, RanksDiffer, StagerunError
from stagerun.base.events import Event, Iterated, Note, Proof, RunFinished
from stagerun.comm import Comm
from stagerun.engine import audit, replicas, update
from stagerun.engine import state as states
from stagerun.engine.codec import mixed
from stagerun.engine.state import TrainState, common, weights
from stagerun.language import load
from stagerun.schedule.audits import broken_link
from stagerun.tools.verify_run.proofs import broken_chains, ways_of
from stagerun.tools.verify_run.states import state_in
from stagerun.train import auditing, stage
from stagerun.train.progress import progress_of

ALL = "audit_param { compare_iter: 2 replay_iter: 1 proof_iter: 3 }"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data") / "lmdb")


def proofs(events: list[Event]) -> list[tuple[str, int, str, str]]:
    return [(e.stage, e.iter, e.state, e.chain) for e in events if isinstance(e, Proof)]


# -- nothing is changed


@pytest.mark.parametrize(
    ("workers", "solver", "shared"),
    [
        (1, "snapshot: 5", ""),
        (2, "snapshot: 5 ema_decay: 0.9", ""),
        (3, "snapshot: 5", ""),
        (3, "snapshot: 5 mixup_alpha: 0.3", "determinism: ELASTIC"),
        (4, "snapshot: 4 sync_param { method: LOCAL replicas: 2 period: 5 }", ""),
        (2, "snapshot: 4 sync_param { method: DILOCO replicas: 4 period: 3 }", ""),
        (2, "snapshot: 5 compress_param { method: TOP_K ratio: 0.1 }", ""),
    ],
    ids=["alone", "two", "three", "elastic", "local", "diloco", "compressed"],
)
def test_audits_change_no_bit_and_raise_no_false_alarm(
    data: Path, tmp_path: Path, workers: int, solver: str, shared: str
) -> None:
    plain = lives(make_schedule(tmp_path / "a", data, solver, shared=shared), tmp_path / "plain", workers)
    audited = lives(make_schedule(tmp_path / "b", data, f"{solver} {ALL}", shared=shared), tmp_path / "out", workers)
    assert [told_of(e) for e in same(plain)] == [told_of(e) for e in same(audited)]
    assert content(tmp_path / "plain") == content(tmp_path / "out")
    found = proofs(audited)
    assert broken_link("", [p[1:] for p in found]) is None and not proofs(plain)
    assert found[0][1] == 0 and found[-1][1] == 12 and len({p[2] for p in found}) == len(found)


def test_proofs_of_an_interrupted_run_are_those_of_an_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    solver = "snapshot: 5 audit_param { proof_iter: 3 }"
    schedule = make_schedule(tmp_path / "s", data, solver, a="max_iter: 12", b="max_iter: 7")
    straight = proofs(lives(schedule, tmp_path / "straight", 2))
    events = lives(schedule, tmp_path / "out", 2, kill_after=8)
    events += lives(schedule, tmp_path / "out", 2, stop_after=3)
    events += lives(schedule, tmp_path / "out", 2)
    again = proofs(events)
    assert len(again) > len(straight) and set(again) == set(straight)
    first = [p for p in straight if p[0] == "a"]
    assert broken_link("", [p[1:] for p in first]) is None
    assert broken_link(first[-1][3], [p[1:] for p in straight if p[0] == "b"]) is None
    assert broken_link("", [p[1:] for p in straight if p[0] == "b"]) == 0


# -- something is wrong


def harmed(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[TrainState], None], ranks: set[int], iter: int
) -> list[int]:
    """`harm` is done once to the state of each of `ranks` after `iter` iterations; the answer counts how often."""
    inner, done = stage._events, list[int]()

    def events(run: stage.StageRun, loop: object, state: TrainState, *rest: object) -> Iterator[Event]:
        for event in inner(run, loop, state, *rest):  # type: ignore[arg-type]
            rank = run.worker.comm.rank
            if isinstance(event, Iterated) and event.iter == iter and rank in ranks and rank not in done:
                done.append(rank)
                harm(state)
            yield event

    monkeypatch.setattr(stage, "_events", events)
    return done


def flip(state: TrainState) -> None:
    weights(state)["conv1.weight"].view(torch.int32).flatten()[3] ^= 1 << 22


def failure(*arguments: object) -> str:
    with pytest.raises(StagerunError) as caught:
        lives(*arguments)  # type: ignore[arg-type]
    assert caught.value.exit_code == ExitCode.RANKS_DIFFER
    return caught.value.message


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What any RanksDiffer said: of a run in this process the error of another rank may come first."""
    said: list[str] = []
    inner = RanksDiffer.__init__

    def init(self: RanksDiffer, message: str, *rest: object, **more: object) -> None:
        said.append(message)
        inner(self, message, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(RanksDiffer, "__init__", init)
    return said


def test_a_flipped_bit_is_found_at_the_next_comparison(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    harmed(monkeypatch, flip, {1}, 5)
    solver = "snapshot: 10 audit_param { compare_iter: 3 replay_iter: 0 }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", 3)
    assert raised[-1].startswith(
        "after iteration 6 of stage `main`: rank 1 has other bits than the other 2 workers in "
    )


def test_a_replicas_holders_are_compared(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    harmed(monkeypatch, flip, {3}, 5)
    solver = "snapshot: 10 sync_param { method: LOCAL replicas: 2 period: 12 } audit_param { compare_iter: 3 replay_iter: 0 }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", 4)
    assert raised[-1].startswith("after iteration 6 of stage `main`: rank 2 and rank 3 have different bits in `1/")


@pytest.mark.parametrize(
    ("solver", "name"),
    [
        ("sync_param { method: DILOCO replicas: 4 period: 3 }", "common/conv1.weight"),
        ("sync_param { method: DILOCO replicas: 4 period: 3 }", "velocity/conv1.weight"),
        ("compress_param { method: POWER_SGD rank: 1 }", "basis/"),
    ],
)
def test_what_all_have_in_common_besides_the_state_is_compared(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str], solver: str, name: str
) -> None:
    """Each replica has one holder, so that no other comparison would see it."""

    def harm(state: TrainState) -> None:
        held = common(state)
        first = next(n for n in held if n.startswith(name))
        held[first].view(torch.int32).flatten()[0] ^= 1 << 22

    assert harmed(monkeypatch, harm, {1}, 5) == []
    audit_param = "audit_param { compare_iter: 5 replay_iter: 0 on_difference: STOP }"
    failure(make_schedule(tmp_path / "s", data, f"snapshot: 12 {solver} {audit_param}"), tmp_path / "out", 4)
    assert f"`{name}" in raised[-1] and "rank 1 has other bits" in raised[-1]


def test_the_average_of_replicas_is_compared_before_they_part_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    inner = replicas.average

    def average(comm: Comm, holders: object, own: object, out: list[torch.Tensor]) -> None:
        inner(comm, holders, own, out)  # type: ignore[arg-type]
        if comm.rank == 1:
            out[0].view(torch.int32).flatten()[0] ^= 1 << 3

    monkeypatch.setattr(replicas, "average", average)
    solver = "snapshot: 12 sync_param { method: LOCAL replicas: 4 period: 4 } audit_param { replay_iter: 0 }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", 4)
    assert raised[-1].startswith(
        "after iteration 4 of stage `main`: rank 1 has other bits than the other 3 workers in "
    )


def test_a_holder_is_looked_at_before_its_replica_is_averaged_into_all(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    """After the synchronisation all would be wrong alike."""
    inner = update.apply

    def applying(state: TrainState, *rest: object) -> None:
        inner(state, *rest)  # type: ignore[arg-type]
        if state.iter == 4 and rank_of.get(id(state)) == 2:
            flip(state)

    events, rank_of = stage._events, dict[int, int]()

    def noticing(run: stage.StageRun, loop: object, state: TrainState, *rest: object) -> Iterator[Event]:
        rank_of[id(state)] = run.worker.comm.rank
        yield from events(run, loop, state, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "_events", noticing)
    monkeypatch.setattr("stagerun.engine.apart.apply", applying)
    solver = "snapshot: 10 sync_param { method: LOCAL replicas: 2 period: 5 start: STAGE_START } audit_param { replay_iter: 0 }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", 4)
    assert raised[-1].startswith("after iteration 5 of stage `main`: rank 2 and rank 3 have different bits in `1/")


@pytest.mark.parametrize("workers", [2, 3])
def test_going_back_ends_in_the_same_bits_and_says_who_was_wrong(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    solver = "snapshot: 4 audit_param { compare_iter: 3 on_difference: ROLLBACK }"
    schedule = make_schedule(tmp_path / "s", data, solver)
    lives(schedule, tmp_path / "straight", workers)
    assert harmed(monkeypatch, flip, {1}, 6 if workers == 2 else 5) == []
    before, alive = states_alive(), list[int]()

    def ask(event: Event) -> None:
        if isinstance(event, Iterated) and event.iter == 9:
            alive.append(states_alive() - before)

    events = lives(schedule, tmp_path / "out", workers, ask=ask)
    assert alive == [workers], "none of what it went back from is held"
    said = [e.text for e in events if isinstance(e, Note) and e.warning]
    assert isinstance(events[-1], RunFinished) and content(tmp_path / "straight") == content(tmp_path / "out")
    assert "back to iteration 4 (main-00000004-a0001), and on with the same images" in said[0]
    if workers == 2:
        assert said[1].startswith("after iteration 6 of stage `main`, trained again, all workers hold the same: ")
        assert "wrong was what rank 1 on " in said[1] and "rank 0" not in said[1]
    else:
        assert "rank 1 has other bits than the other 2 workers" in said[0] and len(said) == 1


def test_of_two_workers_the_wrong_one_is_found_by_training_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    harmed(monkeypatch, flip, {0}, 8)
    schedule = make_schedule(tmp_path / "s", data, "snapshot: 4 audit_param { }")
    failure(schedule, tmp_path / "out", 2)
    assert raised[0].startswith("after iteration 8 of stage `main`: rank 0 and rank 1 have different bits in ")
    assert "trained again, all workers hold the same: wrong was what rank 0 on " in raised[-1]


def test_what_comes_again_at_the_same_place_ends_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    done = harmed(monkeypatch, lambda state: (flip(state), done.clear())[0], {1}, 5)
    solver = "snapshot: 4 audit_param { compare_iter: 3 on_difference: ROLLBACK }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", 2)
    assert len([text for text in raised if text.startswith("after iteration 6")]) >= 2


# -- arithmetic


def erring(monkeypatch: pytest.MonkeyPatch, rank: int, training: set[int], auditing: bool) -> None:
    """Rank `rank` computes losses that are a little too large: in the iterations `training`, and, if `auditing`, in audits."""
    inner, events, mine, right = update.loss_of, stage._events, set[int](), update.loss_of

    def noticing(run: stage.StageRun, loop: object, state: TrainState, *rest: object) -> Iterator[Event]:
        if run.worker.comm.rank == rank:
            mine.add(id(state))
        yield from events(run, loop, state, *rest)  # type: ignore[arg-type]

    def wrong(state: TrainState, *rest: object) -> torch.Tensor:
        found = inner(state, *rest)  # type: ignore[arg-type]
        return found * 1.0001 if id(state) in mine and state.iter in training else found

    monkeypatch.setattr(stage, "_events", noticing)
    monkeypatch.setattr(update, "loss_of", wrong)
    monkeypatch.setattr(audit, "loss_of", wrong if auditing else right)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("stays", [True, False], ids=["stays", "passes"])
def test_who_computes_wrong_is_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str], workers: int, stays: bool
) -> None:
    erring(monkeypatch, 1, set(range(4, 12)) if stays else {4}, stays)
    solver = "snapshot: 4 audit_param { compare_iter: 0 replay_iter: 1 }"
    failure(make_schedule(tmp_path / "s", data, solver), tmp_path / "out", workers)
    assert raised[-1].startswith("iteration 5 of stage `main`: rank ")
    if workers == 2 and stays:
        assert "which is wrong no third can say" in raised[-1]
    else:
        assert "rank 1 on " in raised[-1] and ("computes" if stays else "has once computed") in raised[-1]
        assert all(f"rank {other} on " not in raised[-1] for other in {0, 2, 3})


@pytest.mark.parametrize(
    "solver", ["", "sync_param { method: LOCAL replicas: 4 period: 5 }"], ids=["alone", "replicas"]
)
def test_where_no_other_has_the_weights_a_worker_computes_its_own_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str], solver: str
) -> None:
    erring(monkeypatch, 0, {7}, False)
    schedule = make_schedule(tmp_path / "s", data, f"{solver} audit_param {{ replay_iter: 4 }}")
    failure(schedule, tmp_path / "out", 2 if solver else 1)
    assert raised[-1].startswith("iteration 8 of stage `main`: rank 0 on ") and "wrong in training" in raised[-1]


def test_unlike_processors_are_compared_within_a_tolerance(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: list[str]
) -> None:
    from stagerun.train import walk

    monkeypatch.setattr(walk, "other_machines", lambda comm, device: "rank 1: instruction set DEFAULT")
    erring(monkeypatch, 1, {2, 3}, False)  # by a ten-thousandth
    schedule = make_schedule(tmp_path / "s", data, "audit_param { replay_iter: 1 }")
    assert isinstance(lives(schedule, tmp_path / "out", 2)[-1], RunFinished) and not raised
    monkeypatch.setattr(auditing, "TOLERANCE", dict.fromkeys(audit.TOLERANCE, 1e-6))
    failure(schedule, tmp_path / "strict", 2)
    assert "rank 1" in raised[-1]


def test_pairs_cover_all_in_turn() -> None:
    from stagerun.schedule.audits import audited, auditor, judge

    for workers in (2, 3, 5):
        pairs = {(rank, auditor(rank, n, workers)) for n in range(workers - 1) for rank in range(workers)}
        assert len(pairs) == workers * (workers - 1) and all(a != b for a, b in pairs)
        for n in range(7):
            for rank in range(workers):
                assert audited(auditor(rank, n, workers), n, workers) == rank
                if workers > 2:
                    assert len({rank, auditor(rank, n, workers), judge(rank, n, workers)}) == 3


# -- digests of a GPU, on the CPU: a GPU adds up the same integers


@pytest.mark.parametrize("shape", [(1,), (3,), (4, 5), (70_001,), (2, 3, 4, 4)])
def test_a_digest_of_a_gpu_is_the_sum_of_its_mixed_words(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    data = tensor.numpy().tobytes()
    whole = len(data) // 8 * 8
    words = np.frombuffer(data[:whole] + data[whole:].ljust(8, b"\0"), np.uint64)
    places = np.arange(1, len(words) + 1, dtype=np.uint64)
    places[-1] = np.int64(-len(data)).astype(np.uint64)
    with np.errstate(over="ignore"):
        x = words + places * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        assert mixed(tensor) == int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))
    if len(shape) == 4:
        assert mixed(tensor.to(memory_format=torch.channels_last)) == mixed(tensor)
    assert mixed(torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(shape)) == mixed(tensor)


def test_proofs_of_a_gpu_are_those_of_its_snapshots(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "digest_there", mixed)
    solver = "snapshot: 4 ema_decay: 0.9 audit_param { proof_iter: 4 }"
    schedule = make_schedule(tmp_path / "s", data, solver)
    found = {p[1]: p[2] for p in proofs(lives(schedule, tmp_path / "out", 2))}
    disk = store.LocalDisk()
    for ref in store.inventory(disk, tmp_path / "out").snapshots:
        there = replace(ref, environment={**ref.environment, "device": "a GPU"})
        files, stage = store.read(disk, tmp_path / "out", ref), load(str(schedule)).stage("main")
        assert state_in(stage, there, files) == found[ref.iter] != state_in(stage, ref, files)


def test_proofs_of_a_stage_that_is_tested_are_those_of_its_snapshots(data: Path, tmp_path: Path) -> None:
    """The evaluation comes between the two, and what is known of it is in the snapshot."""
    solver = "snapshot: 4 test_interval: 2 early_stop { metric: LOSS patience_iter: 20 } audit_param { proof_iter: 2 }"
    schedule = make_schedule(tmp_path / "s", data, solver)
    text = (schedule / "schedule.prototxt").read_text()
    more = f'images: 64 }} val {{ source: "{data}" images: 64 }}'
    (schedule / "schedule.prototxt").write_text(text.replace("images: 64 }", more))
    found = {p[1]: p[2] for p in proofs(lives(schedule, tmp_path / "out", 2, stop_after=6))}
    found |= {p[1]: p[2] for p in proofs(lives(schedule, tmp_path / "out", 2))}
    disk, stage = store.LocalDisk(), load(str(schedule)).stage("main")
    made = store.inventory(disk, tmp_path / "out").snapshots
    assert {ref.iter for ref in made} >= {6, 8, 12}
    for ref in made:
        assert state_in(stage, ref, store.read(disk, tmp_path / "out", ref)) == found[ref.iter], ref.name


def test_what_starts_later_from_where_a_stage_has_passed_goes_on_with_its_chain(data: Path, tmp_path: Path) -> None:
    solver, out = "snapshot: 4 audit_param { proof_iter: 2 }", tmp_path / "out"
    folder = make_schedule(tmp_path / "s", data, solver, main="max_iter: 8")
    events = lives(folder, out)
    text = (folder / "schedule.prototxt").read_text()
    for iter in (5, 6):
        text += f'stage {{ name: "from{iter}" from: "main@{iter}" solver_param {{ max_iter: 2 }} }}\n'
    (folder / "schedule.prototxt").write_text(text)
    events += lives(folder, out)
    ways, wrong = ways_of(events)
    assert not wrong and not broken_chains(load(str(folder)), ways) and ways["main"].proofs.keys() == {0, 2, 4, 6, 8}
    disk = store.LocalDisk()
    for ref in store.inventory(disk, out).of("main"):
        link = ways["main"].proofs[ref.iter // 2 * 2]
        assert progress_of(store.read(disk, out, ref)).proof == link.chain, ref.name
