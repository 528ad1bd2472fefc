"""Pools that a schedule's file starts when it is imported: they work, or one message says why they can't."""

import subprocess
import sys
from pathlib import Path

import pytest
import small

PROGRAM = """
import sys
from stagerun.base.code import Sources, code_of
from stagerun.base.errors import UsageError
from stagerun.system.code import called, function_of

if __name__ == "__main__":
    name, text = sys.argv[1], sys.stdin.read()
    start = "from blocks import build" if name == "start.py" else "from .blocks import build"
    files = {name: start, name.replace("start.py", "blocks.py"): text}
    sources = Sources("dir", tuple(sorted(files.items())))
    code = code_of(name + ":build")
    try:
        print(called(code, sources, function_of(code, sources)))
    except UsageError as error:
        print(error.render())
"""
MYNET = """
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

def work(n):
    return n + 1

{at_import}

def build():
    return {inside}
"""


AT_WORK = """
import time
from multiprocessing import Process
from threading import Thread
from torch import nn

def work():
    while True:
        time.sleep(0.1)

Thread(target=work).start()
Thread(target=time.sleep, args=(1000,)).start()
Process(target=work).start()

def build(num_classes, channels):
    layers = nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, num_classes))
"""


def answer(tmp_path: Path, at_import: str, inside: str, name: str = "mynet.py") -> str:
    """What `build` returns, or the error; a deadlock ends after a while. A file `start.py` imports `blocks.py`, which has the text."""
    (tmp_path / "program.py").write_text(PROGRAM)
    text = MYNET.format(at_import=at_import, inside=inside)
    words = [sys.executable, str(tmp_path / "program.py"), name]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["mynet.py", "nets/start.py"])
@pytest.mark.parametrize("pool", ['get_context("fork").Pool(2)', "ThreadPoolExecutor(2)"])
def test_a_pool_may_be_started_and_used_at_import(pool, name, tmp_path):
    at_import = f"POOL = {pool}\nFIRST = list(POOL.map(work, [1]))"
    assert answer(tmp_path, at_import, "FIRST, list(POOL.map(work, [2, 3]))", name) == "([2], [3, 4])"


@pytest.mark.parametrize(
    ("name", "file", "kind", "inside"),
    [
        ("mynet.py", "mynet.py", "spawn", False),
        ("mynet.py", "mynet.py", "forkserver", True),
        ("start.py", "blocks.py", "forkserver", False),
        ("start.py", "blocks.py", "spawn", True),
    ],
)
def test_processes_that_could_not_import_the_file_are_refused_at_its_line(name, file, kind, inside, tmp_path):
    pool = f'get_context("{kind}").Pool(2)'
    found = answer(tmp_path, "" if inside else f"POOL = {pool}", pool if inside else "0", name)
    line, source = (11, f"return {pool}") if inside else (8, f"POOL = {pool}")
    text = "a process that is started by `spawn` or `forkserver` can't import this file"
    assert found.startswith(f"dir/{file}:{line}: {text}\n  {source}\n  hint: take threads"), found
    executor = f'ProcessPoolExecutor(2, get_context("{kind}"))'
    assert text in answer(tmp_path, f"POOL = {executor}", "list(POOL.map(work, [1]))", name)


def test_what_a_file_leaves_at_work_does_not_keep_the_command(tmp_path, data):
    schedule = small.make_schedule(tmp_path / "schedule", data) / "schedule.prototxt"
    model = 'model { name: "mynet.py:build" num_classes: 10 channels: 1 }'
    lines = [model if line.startswith("model {") else line for line in schedule.read_text().splitlines()]
    schedule.write_text("\n".join(lines))
    (schedule.parent / "mynet.py").write_text(AT_WORK)
    done = small.run(schedule.parent, tmp_path / "out", "--only", "init", timeout=120, code=0)
    assert "started by the schedule's Python, ended while at work" in done.stderr
