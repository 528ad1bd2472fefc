"""`run --parallel`: which stage a worker gets, and what becomes of a folder that is taken over, without any worker."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_schedules import schedule, stage

from stagerun.base.errors import ExitCode, StorageError
from stagerun.base.snapshots import Inventory
from stagerun.plan import make_plan
from stagerun.train import parallel
from stagerun.train.options import RunOptions

STAGES = ("a", "b", "c", "d")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[parallel._Run]:
    """Two workers at `a` and `b`, which write what they are given into a file; `c` and `d` wait for a worker."""
    made = schedule(*(stage(name, base_lr=0.1, lr_policy="fixed", max_iter=4) for name in STAGES))
    with tempfile.TemporaryFile() as given:
        it = parallel._Run(RunOptions(str(tmp_path), parallel=2), made, lambda: False)  # type: ignore[arg-type]
        it.plan, it.log = make_plan(made, Inventory()), lambda event: None  # type: ignore[assignment]
        it.keeper = SimpleNamespace(require_held=lambda: None, out=tmp_path)  # type: ignore[assignment]
        it.workers = [parallel._Worker(SimpleNamespace(stdin=given), given, name) for name in "ab"]  # type: ignore[arg-type]
        monkeypatch.setattr(parallel, "_take_over", lambda keeper, folder: [])
        yield it


def ended(run: parallel._Run, number: int) -> list[str]:
    run._ended(run.workers[number], {"code": ExitCode.DONE, "text": "done"})
    return [worker.stage for worker in run.workers]


def test_the_next_stage_is_of_a_plan_that_knows_what_was_taken_over(run: parallel._Run) -> None:
    assert ended(run, 0) == ["c", "b"], "it needn't wait for what is taken over"
    assert ended(run, 1) == ["c", ""], "what `a` has made and lost, the plan doesn't say"
    run.changed = False
    run._give_out()
    assert [worker.stage for worker in run.workers] == ["c", "d"] and run.over == {"a", "b"}


def test_a_stage_that_can_not_be_given_out_ends_the_run_and_not_the_others(
    run: parallel._Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*words: object) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(parallel, "borrow", full)
    assert ended(run, 0) == ["", "b"]
    assert [code for code, _ in run.failed] == [StorageError("").exit_code]
    run.failed.clear()
    (tmp_path / "file").touch()
    run.keeper.out = tmp_path / "file"
    run._give_out()
    assert [code for code, _ in run.failed] == [StorageError("").exit_code], "where no folder can be made, too"


def test_a_kill_while_a_folder_is_removed_leaves_no_half_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / parallel.FOLDER / "a"
    (made / "snapshots" / "a-00000004-a0001").mkdir(parents=True)
    monkeypatch.setattr(parallel, "give_back", lambda *words: None)
    monkeypatch.setattr(parallel.shutil, "rmtree", lambda *words, **more: None)
    keeper = SimpleNamespace(out=tmp_path, schedule=schedule(), inventory=Inventory)
    (tmp_path / "snapshots").mkdir()
    parallel._take_over(keeper, made)  # type: ignore[arg-type]
    assert made.exists() and not (made / "snapshots").exists()
