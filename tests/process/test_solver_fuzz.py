"""What mutated solver files have found (`scripts/reliability solvers`)."""

import pytest
from test_spec_resolve import A, messages, read

# ---- what it has found


@pytest.mark.parametrize("number", ["2.55f", "2.5F", "25e-1f", ".5e1"])
def test_a_duration_in_epochs_may_be_a_float_of_c(number: str) -> None:
    schedule = read(a=A.replace("max_epoch: 2.5", f"max_epoch: {number}"))
    assert schedule.stage("a").solver.max_iter == {"2.55f": 26, ".5e1": 50}.get(number, 25)


def test_an_ensemble_of_a_schedule_without_stages() -> None:
    text = 'model { name: "resnet18" num_classes: 10 } data { train { source: "t" images: 9 } } ensemble { name: "e" members: "x" }'
    assert "member `x` of ensemble `e` is not a stage" in messages(schedule=text)
