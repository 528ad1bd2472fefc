"""`stagerun.run` and `Snapshot`: training in a process that is someone else's."""

import gc
import json
import os
import signal
import threading
import time
from typing import Any

import cv2
import pytest
import torch
from facade import DataError, Iterated, RecipeError, RunFinished, UsageError, decode
from processes import ends

import stagerun
from stagerun.plan import State

ENDLESS = ("init.max_iter=100000", "init.lr_iter=200000")


def test_a_run_that_was_closed_in_between_ends_as_one_that_was_not(finished, tmp_path):
    schedule = stagerun.load(finished / "schedule")
    with stagerun.run(schedule, tmp_path / "out", threads=1) as run:
        for event in run:
            if isinstance(event, Iterated) and event.iter == 3:
                break
    assert next(run, None) is None
    resumed = stagerun.plan(schedule, tmp_path / "out").stages[0]
    assert resumed.state is State.RESUME and resumed.iter in (3, 4)
    again = stagerun.run(schedule, tmp_path / "out", threads=1)
    iters = [e.iter for e in again if isinstance(e, Iterated) and e.stage == "init"]
    assert iters == list(range(resumed.iter + 1, 7))
    assert ends(tmp_path / "out") == ends(finished / "out") and len(ends(finished / "out")) == 4
    assert [type(e) for e in stagerun.run(schedule, tmp_path / "out")][-1] is RunFinished  # nothing left to do


def test_the_process_is_as_it_was(finished, tmp_path, capfd):
    def settings() -> list[Any]:
        handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)]
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        arithmetic = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
        threads = torch.get_num_threads(), cv2.getNumThreads()
        return [handlers, masked, arithmetic, threads, torch.get_rng_state().tolist(), dict(os.environ), os.getcwd()]

    torch.set_num_threads(2)
    try:
        before, living = settings(), threading.active_count()
        list(stagerun.run(finished / "schedule", tmp_path / "out", until="init", threads=1))
        assert settings() == before
        until = time.monotonic() + 10  # what has let go of the folder ends by itself
        while threading.active_count() > living and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() == living
        assert capfd.readouterr() == ("", "")
    finally:
        torch.set_num_threads(1)


def test_an_interrupt_saves(finished, tmp_path):
    """Between two iterations or in the midst of one: it comes where Python waits for the next event."""
    run = stagerun.run(finished / "schedule", tmp_path / "out", overrides=ENDLESS, threads=1)
    assert next(event for event in run if isinstance(event, Iterated))
    main = threading.get_ident()
    clock = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    clock.start()
    done = 0
    with pytest.raises(KeyboardInterrupt):
        for event in run:
            done = max(done, event.iter) if isinstance(event, Iterated) else done
    clock.join()
    planned = stagerun.plan(finished / "schedule", tmp_path / "out", overrides=ENDLESS).stages[0]
    assert planned.state is State.RESUME and planned.iter >= done


def test_a_run_that_no_one_holds_is_saved_and_lets_go_of_the_folder(finished, tmp_path):
    for event in stagerun.run(finished / "schedule", tmp_path / "out", overrides=ENDLESS, threads=1):
        if isinstance(event, Iterated) and event.iter == 3:
            break
    gc.collect()
    planned = stagerun.plan(finished / "schedule", tmp_path / "out", overrides=ENDLESS).stages[0]
    assert planned.iter >= 3
    # A cell that is run again while its first run waits: that one is saved first.
    first = stagerun.run(finished / "schedule", tmp_path / "out", overrides=ENDLESS, threads=1)
    assert next(event for event in first if isinstance(event, Iterated)).iter == planned.iter + 1
    second = stagerun.run(finished / "schedule", tmp_path / "out", overrides=ENDLESS, threads=1)
    assert next(event for event in second if isinstance(event, Iterated)).iter > planned.iter + 1
    assert next(first, None) is None
    second.close()


def test_nothing_is_trained_ahead(finished, tmp_path):
    with stagerun.run(finished / "schedule", tmp_path / "out", threads=1) as run:
        assert not (tmp_path / "out").exists()
        assert next(event for event in run if isinstance(event, Iterated)).iter == 1
        time.sleep(0.5)
        events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
        assert [e["iter"] for e in events if e["event"] == "Iterated"] == [1]


def test_errors_are_those_of_the_command(finished, tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="did you mean `base_lr`"):
        stagerun.run(finished / "schedule", tmp_path / "out", overrides=["init.base_rl=1"])
    run = stagerun.run(finished / "schedule", tmp_path / "out", overrides="data.train.source=/nowhere")
    with pytest.raises(DataError, match="/nowhere"):
        list(run)
    assert next(run, None) is None
    assert json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[-1])["code"] == 65
    with pytest.raises(UsageError, match="no log is called `tensorboards`"):
        stagerun.run(finished / "schedule", tmp_path / "out", log="tensorboards")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="is one worker"):
        stagerun.run(finished / "schedule", tmp_path / "out")


def test_a_snapshot_has_its_network(finished):
    path = finished / "out" / "snapshots" / "init-00000006-a0001"
    snapshot = stagerun.Snapshot(path)
    assert (snapshot.name, snapshot.stage, snapshot.iter) == (path.name, "init", 6)
    assert snapshot.recipe.stage("init").solver.max_iter == 6 and snapshot.recipe.name == "tiny"
    drawn = torch.get_rng_state()
    model = snapshot.model()
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not model.training and not any(module.training for module in model.modules())
    saved = decode((path / "model.safetensors").read_bytes())
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(UsageError, match="has no averaged weights"):
        snapshot.model(ema=True)
    with pytest.raises(UsageError, match="is not a snapshot"):
        stagerun.Snapshot(finished / "out")


@pytest.mark.parametrize("words", [{"until": ["init"]}, {"until": 3}, {"redo": 3}, {"only": [3]}])
def test_what_is_not_a_name_is_refused(finished, tmp_path, words):
    for call in (stagerun.run, stagerun.plan):
        with pytest.raises(UsageError, match=r"one stage's name is wanted|neither a text nor several"):
            call(finished / "schedule", tmp_path / "out", **words)
