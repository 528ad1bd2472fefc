"""What the bits depend on besides the recipe: that snapshots say it, and that what would make a finished stage stale is asked."""

from dataclasses import replace

import pytest
import torch
from engine_help import Threads
from facade import Determinism, ResumeRefused, Schedule, environment_of
from test_plan_trees import SCHEDULE, inventory, on_disk, schedule

from stagerun.comm import Comm, SoloComm, layout_of, make_reducer
from stagerun.engine.device import RECORDED_SINCE, environment
from stagerun.plan import Plan, make_plan
from stagerun.train.environment import require_same

CPU = torch.device("cpu")
GONE = ("main@12", "b_y@4")  # `b_x` came from there, and `b_y` is to start there


def plan(of: Schedule, gone: tuple[str, ...] = GONE, workers: int = 2, **changed: str) -> Plan:
    """As if all had been trained by `workers` in an environment like this one, but for what is `changed`."""
    before = environment_of(of, of.stages[0], CPU, workers) | changed
    found = [replace(ref, environment=before) for place, ref in on_disk(of).items() if place not in gone]
    return make_plan(of, inventory(found))


def refusal(plan: Plan) -> ResumeRefused:
    with pytest.raises(ResumeRefused) as caught:
        require_same(plan, CPU, workers=2)
    return caught.value


@pytest.mark.parametrize("determinism", list(Determinism))
@pytest.mark.parametrize("workers", [1, 2])
def test_the_layout_is_that_of_the_reducer(determinism: Determinism, workers: int) -> None:
    def made(comm: Comm) -> str:
        return make_reducer(determinism, [torch.nn.Parameter(torch.zeros(3))], comm, 4).layout

    layouts = [made(SoloComm())] if workers == 1 else Threads(workers).run(made)
    assert set(layouts) == {layout_of(determinism, workers)}
    of = replace(schedule(), determinism=determinism)
    known = environment_of(of, of.stages[0], CPU, workers)
    assert environment(CPU, workers, layouts[0]).items() <= known.items()


def test_what_an_older_snapshot_did_not_record_refuses_nothing() -> None:
    of = replace(schedule(), sets={"/d/train": "1000 records, sample aa"})
    before = {n: v for n, v in environment_of(schedule(), of.stages[0], CPU, 2).items() if n not in RECORDED_SINCE}
    old = [replace(ref, environment=before) for place, ref in on_disk(of).items() if place not in GONE]
    found = make_plan(of, inventory(old))
    assert found.lost and found.pieces
    require_same(found, CPU, workers=2)
    other = [replace(ref, environment=before | {"threads": "77"}) for ref in old]
    assert "processor" not in refusal(make_plan(of, inventory(other))).message


def test_with_elastic_the_number_of_workers_is_no_matter() -> None:
    s = schedule(SCHEDULE + "determinism: ELASTIC\n")
    require_same(plan(s, workers=1), CPU, workers=2)
    assert "  threads: 77 -> " in refusal(plan(s, workers=1, threads="77")).message


@pytest.mark.parametrize(
    "changed", [{"workers": "3"}, {"workers": "1", "reducer": "solo", "threads": "77"}, {"torch": "2.0"}]
)
def test_what_is_not_as_it_was_is_named(changed: dict[str, str]) -> None:
    refused = refusal(plan(schedule(), **changed))
    assert all(f"  {name}: {value} -> " in refused.message for name, value in changed.items())
    assert "`--redo b_x` goes on here" in refused.hint
