"""Ranks that no longer hold the same state: found at the next snapshot, named, and nothing of it kept."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from facade import (
    Diverged,
    Event,
    Exchange,
    ExitCode,
    Iterated,
    Note,
    PeerError,
    StagerunError,
    TrainState,
    average,
    momentum,
    weights,
)
from nan_help import lives, make_schedule
from processes import content

from stagerun import store
from stagerun.comm import SoloComm
from stagerun.engine.codec import digest
from stagerun.train.agreement import compare
from stagerun.train.hooks import snapshots

pytestmark = pytest.mark.long

SOLVER_TEXT = "snapshot: 3 ema_decay: 0.9"


def test_every_bit_and_its_place_count():
    tensor = torch.arange(1.0, 101.0)
    bits = tensor.view(torch.int32)
    known = {digest(tensor)}
    for place, bit in ((0, 0), (99, 0), (50, 31), (51, 31), (7, 30)):
        bits[place] ^= -(1 << 31) if bit == 31 else 1 << bit
        known.add(digest(tensor))
    assert len(known) == 6  # two flipped signs, 50 and 51, don't cancel
    assert digest(torch.tensor([1.0, 2.0])) != digest(torch.tensor([2.0, 1.0]))
    assert digest(torch.tensor(0.0)) != digest(torch.tensor(-0.0))


def corrupted(
    monkeypatch: pytest.MonkeyPatch, harm: Callable[[TrainState], None], ranks: set[int], iter: int = 5
) -> dict[str, str]:
    """`harm` is done to the state of `ranks` after `iter` iterations. What the comparisons find is added to the answer, once for all
    ranks: which of them comes to it here, before another has raised an error, is not known."""
    inner, compare, found = Exchange.train, snapshots.compare, dict[str, str]()

    def train(self: Exchange, *rest: Any) -> Generator[Event, None, None]:
        for event in inner(self, *rest):
            if isinstance(event, Iterated) and event.iter == iter and self.comm.rank in ranks:
                harm(self.state)
            yield event

    def comparing(comm: object, where: str, *rest: object) -> object:
        good, error = compare(comm, where, *rest)
        found[where] = error.message if error else ""
        return good, error

    monkeypatch.setattr(Exchange, "train", train)
    monkeypatch.setattr(snapshots, "compare", comparing)
    return found


def flip(part: Callable[[TrainState], dict[str, torch.Tensor]], name: str) -> Callable[[TrainState], None]:
    def harm(state: TrainState) -> None:
        part(state)[name].view(torch.int32).flatten()[0] ^= 1 << 3

    return harm


def saved(out: Path) -> list[int]:
    return sorted(ref.iter for ref in store.inventory(store.LocalDisk(), out).snapshots)


@pytest.mark.parametrize(
    ("workers", "harmed"),
    [
        (2, {"conv1.weight": weights, "bn1.running_var": weights}),
        (3, {"steps/fc.bias": momentum, "ema/fc.weight": average}),
    ],
)
def test_flipped_bits_are_found_and_nothing_of_them_kept(few, tmp_path, monkeypatch, workers, harmed):
    schedule = make_schedule(tmp_path / "s", few, SOLVER_TEXT)

    def harm(state: TrainState) -> None:
        for name, part in harmed.items():
            flip(part, name.removeprefix("ema/"))(state)

    found = corrupted(monkeypatch, harm, {1})
    with pytest.raises(StagerunError) as caught:
        lives(schedule, tmp_path / "out", workers)
    assert caught.value.exit_code == ExitCode.RANKS_DIFFER
    first, second = found.values()
    who = "rank 0 and rank 1 have different" if workers == 2 else "rank 1 has other"
    assert not first and second.startswith(f"after iteration 6 of stage `main`: {who} bits")
    assert all(f"`{name}`" in second for name in harmed), second
    assert saved(tmp_path / "out") == [3]


def test_what_ranks_of_one_replica_hold_is_compared_where_the_average_does_not_show_it(few, tmp_path, monkeypatch):
    """The first of them hands it in."""
    sync = "snapshot: 3 sync_param { method: LOCAL replicas: 2 period: 12 }"
    found = corrupted(monkeypatch, flip(weights, "conv1.weight"), {3})
    with pytest.raises(StagerunError) as caught:
        lives(make_schedule(tmp_path / "s", few, sync), tmp_path / "out", 4)
    assert caught.value.exit_code == ExitCode.RANKS_DIFFER and saved(tmp_path / "out") == [3]
    where = "after iteration 6 of stage `main`: rank 3 has other bits than the other 3 workers in `replica 1`"
    assert list(found.values()) == ["", where]


@pytest.mark.parametrize("stop_after, iter", [(8, 8), (None, 12)], ids=["stop", "end"])
def test_also_at_a_stop_and_at_the_end_of_a_stage(few, tmp_path, monkeypatch, stop_after, iter):
    schedule = make_schedule(tmp_path / "s", few, "snapshot: 0")
    found = corrupted(monkeypatch, flip(weights, "conv1.weight"), {0})
    with pytest.raises(StagerunError) as caught:
        lives(schedule, tmp_path / "out", 3, stop_after=stop_after)
    assert caught.value.exit_code == ExitCode.RANKS_DIFFER and saved(tmp_path / "out") == []
    assert list(found.values())[-1].startswith(
        f"after iteration {iter} of stage `main`: rank 0 has other bits than the other 2 workers"
    )


def test_all_ranks_diverge_alike(few, tmp_path, monkeypatch):
    """The same infinity everywhere is no difference; the ranks beside rank 0 find it."""

    def harm(state: TrainState) -> None:
        next(iter(momentum(state).values())).fill_(float("inf"))

    found = corrupted(monkeypatch, harm, {0, 1, 2}, iter=6)
    with pytest.raises(StagerunError) as caught:
        lives(make_schedule(tmp_path / "s", few, SOLVER_TEXT), tmp_path / "out", 3)
    assert caught.value.exit_code == Diverged.exit_code and set(found.values()) == {""}
    assert saved(tmp_path / "out") == [3]


@pytest.fixture
def unlike_hosts(monkeypatch):
    monkeypatch.setattr("stagerun.train.run.other_machines", lambda *_: "rank 1: instruction set DEFAULT")


@pytest.mark.usefixtures("unlike_hosts")
def test_ranks_that_do_not_compute_alike_are_warned_of(few, tmp_path, monkeypatch):
    corrupted(monkeypatch, flip(weights, "conv1.weight"), {1})
    events = lives(make_schedule(tmp_path / "s", few, SOLVER_TEXT), tmp_path / "out", 2)
    warned = [e.text for e in events if isinstance(e, Note) and "different bits" in e.text]
    assert len(warned) == 1 and "rank 1: instruction set DEFAULT" in warned[0] and "`conv1.weight`" in warned[0]
    assert saved(tmp_path / "out")[-1] == 12


def test_what_a_lost_peer_keeps_from_being_compared_is_saved(few, tmp_path, monkeypatch):
    def gone(*rest: object) -> object:
        raise PeerError("gone")

    monkeypatch.setattr(snapshots, "compare", gone)
    with pytest.raises(PeerError):
        lives(make_schedule(tmp_path / "s", few, SOLVER_TEXT), tmp_path / "out", 2)
    assert saved(tmp_path / "out") == [3]


# -- a launched run

# On the path of a process before anything else: after its third update rank 1 flips a bit, once in all lives.
HOOK = """
import os, sys
if os.environ.get("RANK") == "1" and "stagerun.launch.monitor" not in sys.orig_argv:
    import torch
    import stagerun.train.exchange as exchange
    inner = exchange.update
    def update(state, *rest):
        outcome = inner(state, *rest)
        if state.iter == 3 and not os.path.exists(os.environ["FLIPPED"]):
            open(os.environ["FLIPPED"], "w").close()
            next(iter(state.model.parameters())).data.view(torch.int32).view(-1)[5] ^= 1 << 20  # the lowest bit may be lost in the next rounding
        return outcome
    exchange.update = update
"""


@pytest.mark.process
def test_a_launched_run_ends_with_80_and_goes_on_to_the_same_bits(tmp_path, data):
    schedule = small.make_schedule(tmp_path / "schedule", data)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "FLIPPED": str(tmp_path / "flipped")}
    out, words = tmp_path / "out", ("--until", "init", "--set", "determinism=ELASTIC")
    ended = small.run(schedule, out, *words, nproc=2, env=environment)
    assert ended.returncode == 80, ended.stderr
    found = "after iteration 4 of stage `init`: rank 0 and rank 1 have different bits in `conv1.weight`"
    hint = "hint: this state is not saved; run the same command again to resume from the newest snapshot; if it names them again"
    assert found in ended.stderr and hint in ended.stderr, ended.stderr
    assert saved(out) == [2]
    assert "exit code 80" in small.stagerun("status", schedule, "--out", out).stdout
    assert small.run(schedule, out, *words, nproc=2).returncode == 0
    assert small.run(schedule, tmp_path / "straight", *words).returncode == 0
    assert content(out) == content(tmp_path / "straight")


@pytest.mark.usefixtures("unlike_hosts")
def test_among_unlike_hosts_rank_0_saves_nothing_that_is_not_finite(few, tmp_path, monkeypatch):
    """There a difference is only warned of, and what the others have says nothing of what rank 0 has."""

    def harm(state: TrainState) -> None:
        weights(state)["conv1.weight"].view(-1)[0] = float("inf")

    corrupted(monkeypatch, harm, {0}, 3)
    with pytest.raises(StagerunError):
        lives(make_schedule(tmp_path / "s", few, SOLVER_TEXT), tmp_path / "out", 2)
    assert 3 not in saved(tmp_path / "out")


def test_a_state_that_is_known_to_differ_is_not_saved_because_a_peer_is_lost():
    class Alone(SoloComm):
        size = 2

        def all_reduce(self, tensor: torch.Tensor, doing: str = "") -> Callable[[], None]:
            tensor[1] += 5
            return lambda: None

        def gather_bytes(self, mine: bytes) -> list[bytes]:
            raise PeerError("rank 1 is gone")

    _, error = compare(Alone(), "after iteration 3", {"w": 1})
    assert error is not None and "rank 1 is gone" in error.message and "not saved" in (error.hint or "")
