"""`stagerun verify DIR`: what it compares, and that it finds different what is. Its runs: tests/process/test_verify_kills.py; what it refuses:
tests/cases/verify.txt."""

from click.testing import CliRunner
from facade import RunStarted, StageStarted

from stagerun.cli import main
from stagerun.language import load
from stagerun.tools.verify import Life, Verdict, VerifyOptions, render, resumed, shortened


def test_it_is_not_for_a_launcher(base, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(main, ["verify", str(base / "schedule")])
    assert done.exit_code == 64 and "run it once, without a launcher" in done.output


def test_the_schedule_is_saved_inside_its_stages_and_adds_up_several_device_batches(base):
    folder = str(base / "schedule")
    for stage in shortened(VerifyOptions(folder, batches=3), load(folder)).stages:
        assert 0 < stage.solver.snapshot < stage.solver.max_iter or stage.solver.max_iter == 1
        assert stage.solver.logical_workers == 3 and stage.solver.test_interval


def test_a_life_that_began_from_the_seed_resumed_nothing():
    about = {"schedule": "s", "out": "out", "workers": 1, "device": "cpu", "threads": 1, "stages": ("a", "b")}
    started = RunStarted(**about, iterations=3, iterations_left=3, version="0")

    def begun(iter: int, start: str) -> StageStarted:
        sizes = {"max_iter": 9, "batch_size": 8, "device_batch_size": 4}
        return StageStarted(stage="a", number=1, iter=iter, start=start, carried_over="", **sizes)

    assert not resumed([started, begun(0, "seed 1"), begun(1, "a-1")])
    assert resumed([started, begun(1, "a-1")]) and resumed([started, begun(0, "init-3")])
    assert not resumed([started])


def test_a_difference_is_reported():
    lives = [Life("", False, "SIGKILL to rank 0", 69), Life("init-2", True, "", 0)]
    found = Verdict("DIFFERENT", True, lives, {"init": ("a" * 64, "b" * 64)}, ["init"])
    text = render(found, VerifyOptions("s"))
    assert (
        "DIFFERENT: init ended in other bits than in the uninterrupted run (interrupted 1 times, resumed 1 times"
        in text
    )
    assert "On a CPU they should be the same" in text
