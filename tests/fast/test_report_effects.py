"""`report --effect`: matched differences, and their intervals over runs."""

import math
from dataclasses import replace

import pytest

from stagerun.base.errors import UsageError
from stagerun.base.events import StageFinished
from stagerun.tools.report.effects import effect_table, interval, t95
from stagerun.tools.report.history import History, Run, StageHistory

# name: what it starts from, policy, length, weight decay
STAGES = {
    "keep": ("trunk-00000040-a0001", "fixed", "10", "5e-4"),
    "drop": ("trunk-00000040-a0001", "poly", "10", "5e-4"),
    "keep_late": ("trunk-00000080-a0001", "fixed", "10", "5e-4"),
    "drop_late": ("trunk-00000080-a0001", "poly", "10", "5e-4"),
    "long": ("trunk-00000080-a0001", "poly", "20", "5e-4"),
    "decayed": ("trunk-00000080-a0001", "poly", "20", "2e-3"),
}


def stage(name: str, start: str, top1: float, augmentation: str = "mirror") -> StageHistory:
    end = StageFinished(
        stage=name, iterations=100 if name == "trunk" else 10, epochs=1, first_lr=1, last_lr=0, weight_decay=0, augmentation=augmentation, loss=1, top1=top1,
        top5=1, test_loss=1, train_seconds=1, images_per_second=1, snapshot="", tested_on="10 Transform()",
    )  # fmt: skip
    return StageHistory(name=name, start=start, max_iter=10, batch_size=1, finished=end)


def run(label: str, **top1: float) -> Run:
    """One that has finished the stages named, and the trunk."""
    identities = {"trunk": {"solver.lr_policy": '"fixed"', "seed": label}}
    for name in top1:
        _, policy, length, decay = STAGES[name]
        fields = {
            "solver.lr_policy": f'"{policy}"',
            "solver.max_iter": length,
            "solver.weight_decay": decay,
            "seed": label,
        }
        identities[name] = fields | ({"solver.power": "2"} if policy == "poly" else {})
    stages = [
        stage("trunk", f"seed {label}", 0.5),
        *(stage(name, STAGES[name][0], value) for name, value in top1.items()),
    ]
    history = History(schedule="s", stages=tuple(stages), lives=(), complete=True, damaged=0, unknown=0)
    return Run(label=label, history=history, identities=identities)


def test_students_t() -> None:
    """Against tables, at both sides of where the expansion begins."""
    for freedom, value in (
        (1, 12.7062),
        (4, 2.7764),
        (9, 2.2622),
        (10, 2.2281),
        (20, 2.0860),
        (30, 2.0423),
        (120, 1.9799),
    ):
        assert t95(freedom) == pytest.approx(value, abs=1e-3)


def test_an_interval_needs_two_runs() -> None:
    found = interval([0.1, 0.2, 0.3])
    half = 4.3027 * 0.1 / math.sqrt(3)
    assert found == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert interval([0.1]) == (0.1, None, None)


def test_only_what_is_alike_in_all_else_is_matched() -> None:
    """The differences of a run are averaged first: two starts are no two samples. `power` goes with the policy."""
    runs = [
        run("1", keep=0.60, drop=0.70, keep_late=0.70, drop_late=0.74, long=0.9),
        run("2", keep=0.60, drop=0.72, keep_late=0.70, drop_late=0.74, long=0.9),
    ]
    (row,) = effect_table(runs, "lr_policy").rows
    assert row[:2] == ("", "poly") and row[6:] == (4, 2)
    assert row[3] == pytest.approx((0.07 + 0.08) / 2)
    assert row[4] == pytest.approx(0.075 - 12.7062 * math.sqrt(0.00005) / math.sqrt(2), abs=1e-5)
    rows = effect_table(runs, "from", "lr_policy").rows
    assert [(r[0], r[1]) for r in rows] == [("fixed", "trunk@80"), ("poly", "trunk@80")]
    assert [r[3] for r in rows] == pytest.approx([0.10, 0.03])


def test_another_value_to_compare_with() -> None:
    runs = [run("1", drop_late=0.74, long=0.9, decayed=0.8)]
    (row,) = effect_table(runs, "max_iter", against="20").rows
    assert row[1] == "10" and row[3] == pytest.approx(-0.16)
    (row,) = effect_table(runs, "weight_decay").rows
    assert row[1] == "2e-3" and row[3] == pytest.approx(-0.1) and row[4] is None


def test_nothing_to_match_names_what_differs() -> None:
    with pytest.raises(UsageError, match="no two finished stages of a run differ in momentum alone") as found:
        effect_table([run("1", keep=0.6, drop=0.7)], "momentum")
    assert "lr_policy" in str(found.value.hint)


def test_runs_of_one_seed_have_no_interval() -> None:
    """Two of them differ in nothing, and an interval of width 0 would promise what no other seed need keep."""

    def seeded(label: str, seed: str) -> Run:
        found = run(label, keep=0.5, drop=0.6)
        own = {name: {**fields, "seed": seed, "solver.random_seed": seed} for name, fields in found.identities.items()}
        return replace(found, identities=own)

    for seeds, words in (
        ("11", "no intervals: a and b trained the same from the same seed"),
        ("12", "95 %: Student's t"),
    ):
        runs = [seeded(label, seed) for label, seed in zip("ab", seeds, strict=True)]
        assert effect_table(runs, "lr_policy").notes[1].startswith(words)
