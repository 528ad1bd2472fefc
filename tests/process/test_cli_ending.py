"""How a command ends where no one reads its output: the exit code still tells."""

import itertools
import json
import os
import signal
import subprocess
import sys
import unicodedata
from pathlib import Path

import lmdb
import made_up_runs
import pytest
import small
from click.testing import CliRunner
from facade import Datum, Failed, Note, StorageError
from log_help import room

from stagerun import store
from stagerun.cli import main

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def unread(*words: object, cwd: Path) -> int:
    """The exit code of a command whose stdout and stderr go to a pipe that no one reads any more."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        return subprocess.run(
            [sys.executable, "-m", "stagerun", *map(str, words)],
            stdout=pipe, stderr=pipe, env=ENVIRONMENT, cwd=cwd, timeout=120,
        ).returncode  # fmt: skip


@pytest.fixture(scope="module")
def schedule(tmp_path_factory, data):
    return small.make_schedule(
        tmp_path_factory.mktemp("ending") / "schedule", data, cyc1='base_lr: 1e6 lr_policy: "fixed" max_iter: 9'
    )


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_error_keeps_its_exit_code(schedule, tmp_path, nproc):
    words = ("run", schedule, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1)
    assert unread(*words, cwd=tmp_path) == 79
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert '"event": "Failed", "code": 79, "text": "in stage `cyc1` ' in log[-1]
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_worker_waits_for_its_snapshot_and_for_no_thread_of_a_library():
    """torch.compile leaves threads that wait for more to do; a worker of several hung there when all was done."""
    program = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
from stagerun.launch.start import _leave
pool = ThreadPoolExecutor(1)
pool.submit(print, "idle").result()
threading.Thread(target=lambda: (time.sleep(0.2), print("written")), name="snapshot").start()
_leave(3)
"""
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "idle\nwritten\n")


def test_a_mistake_and_a_listing_that_no_one_wants_to_its_end(schedule, tmp_path):
    assert unread("check", "/nowhere", cwd=tmp_path) == 64
    assert unread("plan", schedule, cwd=tmp_path) == 0


def test_a_full_disk_behind_stdout(schedule, tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "plan", str(schedule)],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60,
        )  # fmt: skip
    assert done.returncode == 74 and done.stderr == "standard output can't be written: No space left on device\n"
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_second_interrupt_whose_reader_is_gone():
    program = (
        "import os, signal\n"
        "from stagerun.launch import StopRequest\n"
        "StopRequest().install()\n"
        "reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 2)\n"
        "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, timeout=60)
    assert done.returncode == 130 == 128 + signal.SIGINT


# -- what is printed of files that others have made

ESC = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
SHOWN = "_]0;owned__[2J_31m_".replace("_", "\N{REPLACEMENT CHARACTER}")


def foreign(base: Path) -> dict[str, list[Path | str]]:
    """Commands that print what stands in files, by what these hold: sequences that a terminal would carry out."""
    story = made_up_runs.Story(base / "out").begin()
    story.write(Note(text=f"note {ESC}", warning=True))
    story.write(Failed(code=70, text=f"failed {ESC}"))
    records = [Datum(channels=1, height=2, width=2, data=bytes(4), label=i).SerializeToString() for i in range(2)]
    with lmdb.open(str(base / "db")) as env, env.begin(write=True) as txn:
        for key, record in zip((f"a{ESC}", f"b{ESC}"), (*records[:1], b"no Datum"), strict=True):
            txn.put(key.encode(), record)
    (base / "names").write_text(f"cat{ESC}\ndog{ESC}\n")
    small.make_schedule(base / "bad", base / "data", init=f'base_lr: 0.1 lr_policy: "{ESC}" max_iter: 3')
    (base / "out" / "snapshots" / f"x{ESC}-00000003-a0001").mkdir()
    (base / "out" / "snapshots" / f".bad-x{ESC}-00000003-a0001").mkdir()
    return {
        "failed": ["status", base / "out"],
        "made_up": ["report", base / "out"],
        "nothing": ["status", "--snapshots", base / "out"],
        "not a Caffe Datum": ["data", "verify", "--index", base / "db", "--classes", base / "names", "--max-bad", "1"],
        "cat": ["data", "info", base / "db", "--classes"],
        "]0;owned": ["data", "verify", base / "db"],
        "lr_policy": ["check", base / "bad"],
        "no such": ["check", base / f"gone{ESC}"],
        "lr_polcy": ["plan", base / "bad", "--set", f"solver.lr_polcy={ESC}"],
    }


def test_what_others_wrote_commands_no_terminal(tmp_path):
    for word, command in foreign(tmp_path).items():
        done = CliRunner().invoke(main, [str(part) for part in command])
        text = done.output + done.stderr
        assert word in text or word == "nothing", (command, text)
        assert not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")], (command, text)
        assert done.exit_code != 70, done.output


def test_a_caret_stands_under_its_place(tmp_path):
    small.make_schedule(tmp_path, tmp_path / "data", init=f'base_lr: 0.1 type: "{ESC}" lr_polcy: "fixed" max_iter: 3')
    said = CliRunner().invoke(main, ["check", str(tmp_path)]).output.splitlines()
    lines = [(line, carets) for line, carets in itertools.pairwise(said) if "^" in carets]
    assert [line[carets.index("^") :].split()[0] for line, carets in lines] == [f'"{SHOWN}"', "lr_polcy:"]


# -- what the shell or the machine doesn't give


def test_closed_streams_and_sockets_that_warn(data, tmp_path):
    """Without stdout the worker's sign of life had its number, and the monitors read /dev/null in its place."""
    small.make_schedule(tmp_path / "short", data, init='base_lr: 0.01 lr_policy: "fixed" max_iter: 1')
    with open(tmp_path / "said", "w") as said:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "run", "short", "--until", "init", "--nproc", "2", "--threads", "1"],
            preexec_fn=lambda: os.close(1), stderr=said, cwd=tmp_path, timeout=120,
            env={**ENVIRONMENT, "PYTHONWARNINGS": "error::ResourceWarning"},
        )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "said").read_text() == ""
    assert not list(tmp_path.glob("stagerun-bug-*"))


LIMITS = {
    "OSError(24, 'Too many open files')": (74, "limit of this process is 4096", "ulimit -n"),
    "MemoryError()": (74, "1.0 TB of address space", "ulimit -v"),
    "RuntimeError('DefaultCPUAllocator: can\\'t allocate memory: you')": (74, "1.0 TB of address", "ulimit -v"),
    "RuntimeError('could not create a primitive')": (74, "1.0 TB of address space", "ulimit -v"),
    "RuntimeError('CUDA out of memory')": (70, "CUDA out of memory", ""),
}
MEETS = """
import json, os, resource, sys, tempfile
from stagerun.command.ending import end_with
from stagerun.launch.start import Orders, work
for kind, most in ((resource.RLIMIT_NOFILE, 4096), (resource.RLIMIT_AS, 10**12)):
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
ends = []
for error in map(eval, sys.argv[1:]):
    def job(*_):
        raise error
    for kind in ("worker", "command"):
        said = tempfile.TemporaryFile("w+")
        if not (pid := os.fork()):
            os.dup2(said.fileno(), 2)
            if kind == "worker":
                sys.exit(work(job, Orders(("run",), None)))
            end_with(error)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        ends.append((repr(error), kind, code, said.read(), os.listdir()))
print(json.dumps(ends))
"""


def test_a_limit_of_the_shell_is_not_a_bug(tmp_path):
    """Neither of the command nor of a worker."""
    command = [sys.executable, "-c", MEETS, *LIMITS]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    ends = json.loads(done.stdout.splitlines()[-1])
    assert len(ends) == 2 * len(LIMITS)
    for (code, what, hint), end in zip((row for row in LIMITS.values() for _ in "ab"), ends, strict=True):
        _, _, found, said, left = end
        assert found == code and what in said and hint in said and bool(left) == (code == 70), end


def test_the_limit_on_the_size_of_files_is_named(tmp_path):
    with room(1000), pytest.raises(StorageError) as caught:
        store.write_atomic(store.LocalDisk(), tmp_path / "x", bytes(2000))
    assert caught.value.hint.startswith("files may have 1.0 kB at most here: raise that limit (ulimit -f)")


def test_a_current_folder_that_is_gone_is_said_first(tmp_path):
    (tmp_path / "gone").mkdir()
    program = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', 'stagerun', 'run', '/x'])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "gone",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 64
    assert done.stderr == "the current folder has been deleted\n  hint: `cd` to an existing one\n"
