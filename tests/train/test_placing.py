"""How workers agree about where they are bound and how many threads they have: two as threads of this process, on a described machine,
and nothing is moved."""

import os
from types import SimpleNamespace

import pytest
import torch
from engine_help import Threads
from test_topology import machine

from stagerun.base.events import Note
from stagerun.system.world import THREADS_GIVEN, World
from stagerun.train import join as placing
from stagerun.train.join import Wish, place

CPU = torch.device("cpu")


def notes(monkeypatch: pytest.MonkeyPatch, wish: Wish, *given: int | None) -> tuple[list[Note | None], list[int]]:
    """What two ranks report on a machine of two sockets, and their threads. `given`: what was chosen in the environment of each."""
    left, set_to = list(given), list[int]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(placing, "read", lambda *words: machine("2x24_smt"))
    nothing = SimpleNamespace(claim=lambda seat: True, bind=lambda seat: None, bind_communication=lambda: None)
    monkeypatch.setattr(placing, "binding", nothing)
    if given:
        monkeypatch.setattr(placing, "given_threads", lambda: left.pop())
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    world = [World(rank=rank, size=2, local_rank=rank, local_size=2) for rank in range(2)]
    return Threads(2).run(lambda comm: place(world[comm.rank], CPU, comm, wish)), set_to


def test_one_number_of_threads_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of one host may say something else than that of another: with two numbers the bits would hang on who is where."""
    for given in ((8, 4), (None, 4)):
        (note, _), threads = notes(monkeypatch, Wish(), *given)
        assert note and note.warning and "4 threads each, though OMP_NUM_THREADS" in note.text and threads == [4, 4]
    (note, _), threads = notes(monkeypatch, Wish(), None, None)
    assert note and not note.warning and note.text.endswith("22 threads each") and threads == [22, 22]


def test_a_thread_that_torchrun_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv(THREADS_GIVEN, raising=False)
    (note, _), threads = notes(monkeypatch, Wish())
    assert note and note.warning and "1 thread each, as torchrun says" in note.text and "`--threads 22`" in note.text
    (note, _), threads = notes(monkeypatch, Wish(threads=1))
    assert note and not note.warning and threads == [1, 1]
