"""MLPerf's lines, for made-up events."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from log_help import (
    COLLAPSE,
    TRUNK,
    evaluated,
    feed,
    finished,
    make,
    records,
    run_started,
    stage_started,
    trained,
    values,
    where,
)

from stagerun.base.events import Event, RunFinished
from stagerun.plan import Plan
from stagerun.train.logs.course import course
from stagerun.train.logs.mllog import MLLog, settings


def mllog(out: Path, plan: Plan, *events: Event | Iterator[Event], warned: list[str] | None = None) -> None:
    """One process life."""
    said = warned if warned is not None else []
    with MLLog(out / "mllog.txt", plan.schedule, course(plan), said.append) as log:
        feed(log, run_started(), *events)


def whole() -> list[Event | Iterator[Event]]:
    return [
        stage_started("trunk"),
        trained("trunk", range(1, 6)),
        evaluated("trunk", 5, 0.25),
        evaluated("trunk", 5, 0.1, images=40),
        trained("trunk", range(6, 9)),
        evaluated("trunk", 8, 0.5),
        finished("trunk", 8, 0.5, 1.0),
        stage_started("collapse"),
        trained("collapse", range(1, 5)),
        evaluated("collapse", 4, 0.75),
        evaluated("collapse", 4, 0.8, ema=True),
        finished("collapse", 4, 0.75, 1.0),
        RunFinished(trained=True, seconds=1),
    ]


def test_mllog_of_a_whole_run(tmp_path: Path) -> None:
    mllog(tmp_path, make(), *whole())
    path = tmp_path / "mllog.txt"
    keys = [record["key"] for record in records(path)]
    assert keys[0] == "init_start" and keys.index("init_stop") + 1 == keys.index("run_start") and keys[-1] == "run_stop"
    assert [keys.count(key) for key in ("init_start", "init_stop", "run_start", "run_stop")] == [1, 1, 1, 1]
    assert (values(path, "train_samples"), values(path, "eval_samples")) == ([100], [50])
    assert values(path, "seed") == [7, 7] and values(path, "global_batch_size") == [20, 20]
    assert values(path, "gradient_accumulation_steps") == [3, 3], "5 device batches on 2 workers"
    assert values(path, "sgd_opt_base_learning_rate") == [0.5, 0.1]
    assert values(path, "eval_accuracy") == [0.25, 0.5, 0.75, 0.8], "not that of a part of the images"
    assert where(path, "eval_accuracy", "epoch_num") == [1, 1.6, 2.4, 2.4]
    assert where(path, "eval_accuracy", "weights") == [None, None, None, "averaged"]
    assert where(path, "run_stop", "status") == ["success"]
    times = [record["time_ms"] for record in records(path) if record["key"] not in ("eval_start", "epoch_start")]
    assert times == sorted(times)


def test_mllog_has_a_start_and_a_stop_of_each_epoch_of_each_stage(tmp_path: Path) -> None:
    mllog(tmp_path, make(), *whole())
    path = tmp_path / "mllog.txt"
    spans = [[(n, i) for n, i in zip(where(path, k, "epoch_num"), where(path, k, "samples_count"), strict=True)]
             for k in ("epoch_start", "epoch_stop")]  # fmt: skip
    assert spans == [[(1, 0), (2, 100), (2, 160), (3, 200)], [(1, 100), (2, 160), (2, 200), (3, 240)]]


def test_mllog_where_a_batch_straddles_epochs(tmp_path: Path) -> None:
    plan = make(trunk=TRUNK + "batch_size: 240 device_batch_size: 240")
    mllog(tmp_path, plan, stage_started("trunk"), trained("trunk", range(1, 3)))
    assert where(tmp_path / "mllog.txt", "epoch_start", "epoch_num") == [1, 2, 3, 4, 5]
    assert where(tmp_path / "mllog.txt", "epoch_stop", "epoch_num") == [1, 2, 3, 4]


def test_mllog_after_a_kill_is_that_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    def essence(path: Path) -> list[Any]:
        return [(r["key"], r["value"], {**r["metadata"], "lineno": 0}) for r in records(path)]

    def on(at: int, last: int) -> list[Event | Iterator[Event]]:
        """From iteration `at` of the trunk on, with the evaluation at 5."""
        middle = [trained("trunk", range(at + 1, 6)), evaluated("trunk", 5, 0.25)] if at < 5 else []
        return [stage_started("trunk", at), *middle, trained("trunk", range(max(at, 5) + 1, last + 1))]

    (tmp_path / "straight").mkdir()
    mllog(tmp_path / "straight", make(), *on(0, 8), *whole()[5:])
    for at in (0, 3, 5):
        out = tmp_path / str(at)
        out.mkdir()
        # Ended by an error; then killed without a word; each time on from `at`.
        mllog(out, make(), *on(0, 6), evaluated("trunk", 6, 0.3))
        assert where(out / "mllog.txt", "run_stop", "status") == ["aborted"]
        feed(MLLog(out / "mllog.txt", make().schedule, course(make()), print), run_started(), *on(at, 7))
        assert not values(out / "mllog.txt", "run_stop")
        mllog(out, make(), *on(at, 8), *whole()[5:])
        assert essence(out / "mllog.txt") == essence(tmp_path / "straight" / "mllog.txt"), f"resumed at {at}"


def test_mllog_of_a_stage_trained_again_has_its_new_settings_only(tmp_path: Path) -> None:
    mllog(tmp_path, make(), *whole())
    mllog(tmp_path, make(trunk=TRUNK.replace("0.5", "0.4")), *whole())
    assert sorted(values(tmp_path / "mllog.txt", "sgd_opt_base_learning_rate")) == [0.1, 0.4]
    assert values(tmp_path / "mllog.txt", "eval_accuracy") == [0.25, 0.5, 0.75, 0.8]


def test_mllog_states_what_another_number_of_workers_changes(tmp_path: Path) -> None:
    mllog(tmp_path, make(), stage_started("trunk"), trained("trunk", range(1, 5)))
    with MLLog(tmp_path / "mllog.txt", make().schedule, course(make()), print) as log:
        feed(log, replace(run_started(), workers=5), stage_started("trunk", 2))
    assert values(tmp_path / "mllog.txt", "gradient_accumulation_steps") == [3, 1]
    assert values(tmp_path / "mllog.txt", "global_batch_size") == [20]


def test_mllog_takes_a_second_evaluation_of_the_same_weights_for_the_first(tmp_path: Path) -> None:
    mllog(tmp_path, make(), *whole())
    mllog(tmp_path, make(), evaluated("collapse", 4, 0.7), RunFinished(trained=True, seconds=1))
    assert values(tmp_path / "mllog.txt", "eval_accuracy") == [0.25, 0.5, 0.8, 0.7]
    assert where(tmp_path / "mllog.txt", "run_stop", "status") == ["success"]
    assert records(tmp_path / "mllog.txt")[-1]["key"] == "run_stop"


def test_mllog_has_no_evaluation_before_the_run_has_started(tmp_path: Path) -> None:
    """A life that only evaluates: the log was asked for when everything was trained."""
    life = [evaluated("trunk", 8, 0.5), finished("trunk", 8, 0.5, 1.0)]
    mllog(tmp_path, make(), *life, RunFinished(trained=True, seconds=1))
    assert not (tmp_path / "mllog.txt").exists()
    mllog(tmp_path, make(), *life, *whole()[7:])
    assert records(tmp_path / "mllog.txt")[0]["key"] == "init_start"
    assert values(tmp_path / "mllog.txt", "eval_accuracy") == [0.75, 0.8]


def test_mllog_says_that_it_leaves_foreign_lines_out(tmp_path: Path) -> None:
    (tmp_path / "mllog.txt").write_text(':::MLLOG {"key": "x"}\n:::MLLOG 1\nhello\n')
    said: list[str] = []
    mllog(tmp_path, make(), *whole(), warned=said)
    assert len(said) == 1 and "3 lines" in said[0] and "mllog.txt" in said[0]
    assert records(tmp_path / "mllog.txt")[0]["key"] == "init_start"


@pytest.mark.parametrize(
    "text, expected",
    [
        ('type: "LARS"', {"opt_name": "lars", "lars_opt_base_learning_rate": 0.1, "lars_opt_momentum": 0.9,
                          "lars_opt_learning_rate_decay_poly_power": 2.0, "lars_opt_learning_rate_decay_steps": 4}),
        ('type: "Nesterov"', {"opt_name": "nesterov", "opt_base_learning_rate": 0.1, "opt_weight_decay": 1e-3}),
        ('type: "AdamW"', {"opt_name": "adamw", "opt_adamw_beta_1": 0.9, "opt_adamw_beta_2": 0.999,
                           "opt_adamw_weight_decay": 1e-3, "opt_base_learning_rate": 0.1}),
        ("clip_gradients: 3", {"opt_name": "sgd", "sgd_opt_weight_decay": 1e-3, "sgd_opt_momentum": 0.9,
                               "opt_gradient_clip_norm": 3, "opt_learning_rate_warmup_epochs": 0.2}),
    ],
)  # fmt: skip
def test_mlperfs_names_of_the_settings(text: str, expected: dict[str, Any]) -> None:
    solver = make(collapse=COLLAPSE + text).schedule.stage("collapse").solver
    found = settings(solver, 100, 2)
    assert expected.items() <= found.items()
    assert len([key for key in found if key.endswith("base_learning_rate")]) == 1
