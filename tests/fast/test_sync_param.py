"""`sync_param`: when replicas meet, and what depends on it. What is said of it: cases/plan_replicas. Mistakes: golden/spec/sync and sync_async."""

from dataclasses import replace
from itertools import pairwise

import contract
import pytest
from facade import Schedule, Solver, Sync, SyncMethod, cost_key, read_recipe, rehearsal
from hypothesis import given
from hypothesis import strategies as st

from stagerun import language
from stagerun.schedule import boundaries, learning_rate, parting, synchronisations

SCHEDULE = """name: "made_up" model { name: "resnet_small" num_classes: 10 }
data { train { source: "/data" images: 100 } } stage { name: "a" } stage { name: "b" }
solver { batch_size: 20 device_batch_size: 5 base_lr: 0.1 lr_policy: "fixed" max_iter: 50 }"""


def read(a: str = "", b: str = "", changes: tuple[str, ...] = (), more: str = "") -> Schedule:
    texts = {"schedule.prototxt": (SCHEDULE + more).encode(), "a.prototxt": a.encode(), "b.prototxt": b.encode()}
    return language.read(texts, "/s", changes)


def solver(text: str, sync: str) -> Solver:
    return read(f"{text} sync_param {{ {sync} }}").stage("a").solver


# -- when


def test_every_period_and_at_the_end():
    local = "method: LOCAL replicas: 4 period: 20"
    assert synchronisations(solver("", local)) == (20, 40, 50)
    assert synchronisations(solver("warmup_iter: 8", local)) == (28, 48, 50)
    assert synchronisations(solver("warmup_iter: 8", local + " start: STAGE_START")) == (20, 40, 50)
    assert synchronisations(solver("max_iter: 40", local)) == (20, 40)
    assert synchronisations(solver("max_iter: 7", local)) == (7,)
    assert synchronisations(solver("", "method: DILOCO replicas: 2 period: 50")) == (50,)
    assert synchronisations(read().stage("a").solver) == ()


def test_the_quadratic_rule_goes_by_the_rate_of_the_next_iteration():
    """By hand: rates 0.1 to iteration 9, 0.05 to 29, 0.025 from 30 on; (0.2 / lr)^2 = 4, 16, 64."""
    steps = 'lr_policy: "multistep" gamma: 0.5 stepvalue: [10, 30] max_iter: 120'
    qsr = "method: LOCAL replicas: 4 rule: QSR alpha: 0.2 period:"
    assert synchronisations(solver(steps, f"{qsr} 3")) == (4, 8, 12, 28, 44, 108, 120)
    assert synchronisations(solver(steps, f"{qsr} 10")) == (10, 26, 42, 106, 120)
    warm = steps + " warmup_iter: 6 warmup_start_lr: 0.001"
    assert synchronisations(solver(warm, f"{qsr} 3")) == (10, 26, 42, 106, 120)
    # The rule would wait for ever while the rate is next to nothing, and does where it is 0.
    assert synchronisations(solver(warm, f"{qsr} 3 start: STAGE_START")) == (120,)
    assert synchronisations(solver("base_lr: 0", f"{qsr} 3")) == (50,)
    assert synchronisations(solver("base_lr: 1e-300", f"{qsr} 3")) == (50,)


POLICIES = '"fixed"', '"poly" power: 2', '"cosine"'


@given(st.sampled_from(POLICIES), st.integers(1, 40), st.floats(1e-3, 1e3), st.integers(0, 49))
def test_no_two_are_closer_than_the_period_and_the_last_is_at_the_end(policy, period, alpha, warm_up):
    sync = f"method: LOCAL replicas: 2 rule: QSR alpha: {alpha!r} period: {period}"
    found = solver(f"lr_policy: {policy} warmup_iter: {warm_up}", sync)
    places = [parting(found), *synchronisations(found)]
    gaps = [b - a for a, b in pairwise(places)]
    assert places[-1] == found.max_iter and min(gaps) > 0 and all(gap >= period for gap in gaps[:-1])
    rate = learning_rate(found)
    for at, gap in zip(places, gaps[:-1], strict=False):
        grown = (alpha / rate(at)) ** 2
        assert gap == period or (gap <= grown * (1 + 1e-9) and grown * (1 - 1e-9) < gap + 1)


# -- the language


def test_async_has_no_period_and_no_synchronisation():
    found = solver("warmup_iter: 50", "method: ASYNC replicas: 3 max_staleness: 5")
    assert found.sync == Sync(method=SyncMethod.ASYNC, replicas=3, max_staleness=5)
    assert found.sync.period is None and synchronisations(found) == () and found.asynchronous
    assert found.most_workers == 3 and found.logical_workers == 4
    assert not solver("", SYNCS[0]).asynchronous and solver("", SYNCS[1]).most_workers == 4


def test_boundaries_are_where_anything_looks_at_the_state():
    found = replace(solver("snapshot: 20", "method: ASYNC replicas: 2 max_staleness: 1"), test_interval=25)
    assert boundaries(found, ()) == (20, 25, 40, 50)
    assert boundaries(found, (7, 50)) == (7, 20, 25, 40, 50)
    assert boundaries(solver("max_iter: 3", "method: ASYNC replicas: 2 max_staleness: 1"), ()) == (3,)


def test_more_workers_than_replicas_are_refused(tmp_path):
    few = "sync_param { method: ASYNC replicas: 2 max_staleness: 1 }"
    for name, text in (("schedule", SCHEDULE), ("a", few), ("b", "")):
        (tmp_path / f"{name}.prototxt").write_text(text)
    words = ["sbatch", ".", "--nodes", 1, "--time", "1h", "--workers-per-node"]
    said = contract.stagerun([*words, 3], tmp_path)
    assert said.exit_code == 64
    assert "a.prototxt:1:38: 3 workers are too many for stage a: `method: ASYNC` has 2 replicas" in said.stderr
    assert contract.stagerun([*words, 2], tmp_path).exit_code == 0


def test_an_iteration_of_a_rehearsal_is_one_device_batch_of_one_worker():
    short = rehearsal(read("sync_param { method: ASYNC replicas: 4 max_staleness: 4 }"), 5, 4, None)
    a, b = short.stages
    assert (a.solver.batch_size, b.solver.batch_size) == (5, 20) and a.solver.base_lr == 0.1 / 4 == b.solver.base_lr / 4
    assert a.solver.asynchronous and a.solver.max_iter == 5
    assert cost_key(short, a) != cost_key(short, b), "of pushes the time from one to the next is measured"


SYNCS = (
    "method: LOCAL replicas: 4 period: 8",
    "method: LOCAL replicas: 2 period: 8",
    "method: LOCAL replicas: 4 period: 9",
    "method: LOCAL replicas: 4 period: 8 momentum: AVERAGE",
    "method: LOCAL replicas: 4 period: 8 start: STAGE_START",
    "method: LOCAL replicas: 4 period: 8 rule: QSR alpha: 0.2",
    "method: DILOCO replicas: 4 period: 8",
    "method: DILOCO replicas: 4 period: 8 outer { base_lr: 0.5 }",
    "method: ASYNC replicas: 4 max_staleness: 4",
    "method: ASYNC replicas: 2 max_staleness: 4",
    "method: ASYNC replicas: 4 max_staleness: 5",
)


def test_what_is_written_is_part_of_the_identity():
    schedules = [read(f"sync_param {{ {text} }}" if text else "") for text in ("", *SYNCS)]
    assert len({language.digest(schedule) for schedule in schedules}) == len(schedules)
    for written, spelt in (
        (SYNCS[0], SYNCS[0] + " rule: CONSTANT start: WARMUP_END momentum: KEEP"),
        (SYNCS[6], SYNCS[6] + ' outer { type: "Nesterov" base_lr: 0.7 momentum: 0.9 }'),
        (SYNCS[6], SYNCS[6] + " outer { }"),
    ):
        one, other = (read(f"sync_param {{ {text} }}") for text in (written, spelt))
        assert language.digest(one) == language.digest(other)


def test_a_snapshot_of_several_servers_is_refused_by_name():
    text = language.canonical(read(f"sync_param {{ {SYNCS[8]} }}"))
    assert read_recipe(text.replace("max_staleness: 4", "max_staleness: 4\n      servers: 1"))
    with pytest.raises(ValueError, match="`servers` was retired: write nothing: one server holds the model"):
        read_recipe(text.replace("max_staleness: 4", "max_staleness: 4\n      servers: 2"))


def test_a_stage_that_branches_off_is_no_part_of_what_it_starts_from():
    sync = f"sync_param {{ {SYNCS[0]} }}"
    alone, both = read(sync).stage("a"), read(sync, more=' stage { name: "c" from: "a@3" solver_param { } }').stage("a")
    assert alone.identity == both.identity and synchronisations(alone.solver) == synchronisations(both.solver)
