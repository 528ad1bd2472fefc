"""`stagerun.load`, `plan` and `report`: what needs no torch."""

from pathlib import Path

import made_up_runs
import pytest
from facade import RecipeError, UsageError, render_text

import stagerun

SCHEDULE = Path(__file__).parents[2] / "solvers" / "resnet50_72ep"


def test_every_name_is_there():
    assert all(hasattr(stagerun, name) for name in stagerun.__all__) and set(stagerun.__all__) <= set(dir(stagerun))
    with pytest.raises(AttributeError, match="module 'stagerun' has no attribute 'trian'"):
        stagerun.trian  # noqa: B018


def test_plan_is_the_function_whatever_was_imported_before():
    import stagerun.plan as folder
    from stagerun import plan

    assert plan is folder is stagerun.plan
    assert stagerun.plan(SCHEDULE, "nowhere").stages[0].stage.name == "init"


def test_a_plan_is_what_the_command_prints(tmp_path):
    schedule = stagerun.load(SCHEDULE, ["cyc2.base_lr=0.5"])
    found = stagerun.plan(schedule, tmp_path)
    assert str(found) == render_text(found) and "cyc2      cyc1" in str(found)
    assert repr(found).startswith("<Plan of resnet50_72ep: ")
    assert found.schedule is schedule
    assert found == stagerun.plan(SCHEDULE, tmp_path, overrides="cyc2.base_lr=0.5")
    assert [p.stage.name for p in stagerun.plan(SCHEDULE, tmp_path, until="cyc1").work] == ["init", "cyc1"]


def test_mistakes_are_shown_as_the_command_shows_them():
    with pytest.raises(RecipeError) as caught:
        stagerun.load(SCHEDULE, ["cyc2.base_rl=0.5", "seeed=2"])
    assert str(caught.value) == caught.value.render()
    assert "did you mean `base_lr`?" in str(caught.value) and "2 mistakes" in str(caught.value)
    assert caught.value._render_traceback_() == caught.value.render().splitlines()
    with pytest.raises(UsageError, match="a schedule that is loaded"):
        stagerun.plan(stagerun.load(SCHEDULE), overrides=["seed=2"])
    with pytest.raises(RecipeError, match="inti"):
        stagerun.plan(SCHEDULE, only="inti")


def test_a_report_has_the_rows_of_the_command(tmp_path, capsys):
    outs = made_up_runs.three_seeds(tmp_path)
    found = stagerun.report(outs)
    assert [(row["run"], row["stage"], row["top1"]) for row in found[:3]] == [
        ("seed1", "init", 0.6),
        ("seed1", "cyc1", 0.8),
        ("seed1", "collapse", 0.91),
    ]
    printed = made_up_runs.rows(*outs)
    assert [list(row) for row in found] == [list(row) for row in printed]
    assert [row["images_per_second"] for row in found] == [float(row["images_per_second"]) for row in printed]
    assert str(found).startswith("Stages\nrun    stage") and "\nseed1  init" in str(found)
    assert [row["n"] for row in stagerun.report(outs, by="seed")] == [3, 3, 3]
    assert len(stagerun.report(outs[0])) == 3  # one folder, by itself
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    passed_over = stagerun.report([*outs, tmp_path / "empty"])
    assert passed_over == found and "empty has no log.jsonl" in passed_over.notes[0]
    assert capsys.readouterr() == ("", "")
    with pytest.raises(UsageError) as caught:
        stagerun.report(outs, by="stages")
    assert caught.value.hint == "did you mean `stage`?"
