"""How a command ends where no one reads its output: the exit code still tells."""

import contextlib
import errno
import io
import itertools
import os
import resource
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import lmdb
import made_up_runs
import pytest
import small
import tiny
from click.testing import CliRunner
from facade import Datum

from stagerun.base import events
from stagerun.cli import main
from stagerun.command.ending import of_surroundings, printable
from stagerun.store.errors import storage_failure

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
def schedule(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ending")
    tiny.make_data(base / "data")
    return small.make_schedule(base / "schedule", base / "data", cyc1='base_lr: 1e6 lr_policy: "fixed" max_iter: 9')


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_error_keeps_its_exit_code(schedule: Path, tmp_path: Path, nproc: int) -> None:
    words = ("run", schedule, "--out", tmp_path / "out", "--nproc", nproc, "--threads", 1)
    assert unread(*words, cwd=tmp_path) == 79
    log = (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    assert '"event": "Failed", "code": 79, "text": "in stage `cyc1` ' in log[-1]
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_worker_waits_for_its_snapshot_and_for_no_thread_of_a_library() -> None:
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


def test_a_mistake_and_a_listing_that_no_one_wants_to_its_end(schedule: Path, tmp_path: Path) -> None:
    assert unread("check", "/nowhere", cwd=tmp_path) == 64
    assert unread("plan", schedule, cwd=tmp_path) == 0


def test_a_full_disk_behind_stdout(schedule: Path, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "plan", str(schedule)],
            stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path, timeout=60,
        )  # fmt: skip
    assert done.returncode == 74 and done.stderr == "standard output can't be written: No space left on device\n"
    assert not list(tmp_path.glob("stagerun-bug-*"))


def test_a_second_interrupt_whose_reader_is_gone() -> None:
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
    story.write(events.Note(text=f"note {ESC}", warning=True))
    story.write(events.Failed(code=70, text=f"failed {ESC}"))
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
        "not a Caffe Datum": ["data", "index", base / "db", "--classes", base / "names", "--max-bad", "1"],
        "cat": ["data", "info", base / "db"],
        "]0;owned": ["data", "verify", base / "db"],
        "lr_policy": ["check", base / "bad"],
        "no such": ["check", base / f"gone{ESC}"],
        "lr_polcy": ["plan", base / "bad", "--set", f"solver.lr_polcy={ESC}"],
    }


def test_what_others_wrote_commands_no_terminal(tmp_path: Path) -> None:
    for word, command in foreign(tmp_path).items():
        done = CliRunner().invoke(main, [str(part) for part in command])
        text = done.output + done.stderr
        assert word in text or word == "nothing", (command, text)
        assert not [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf")], (command, text)
        assert done.exit_code != 70, done.output


def test_a_caret_stands_under_its_place_and_what_is_printed_is_printable(tmp_path: Path) -> None:
    small.make_schedule(tmp_path, tmp_path / "data", init=f'base_lr: 0.1 type: "{ESC}" lr_polcy: "fixed" max_iter: 3')
    said = CliRunner().invoke(main, ["check", str(tmp_path)]).output.splitlines()
    lines = [(line, carets) for line, carets in itertools.pairwise(said) if "^" in carets]
    assert [line[carets.index("^") :].split()[0] for line, carets in lines] == [f'"{SHOWN}"', "lr_polcy:"]
    page = io.StringIO()
    with contextlib.redirect_stdout(page), printable():
        print(f"red {ESC}")
    assert page.getvalue() == f"red {SHOWN}\n"


# -- what the shell or the machine doesn't give


def test_closed_streams_and_sockets_that_warn(schedule: Path, tmp_path: Path) -> None:
    """Without stdout the worker's sign of life had its number, and the monitors read /dev/null in its place."""
    small.make_schedule(
        tmp_path / "short", schedule.parent / "data", init='base_lr: 0.01 lr_policy: "fixed" max_iter: 1'
    )
    with open(tmp_path / "said", "w") as said:
        done = subprocess.run(
            [sys.executable, "-m", "stagerun", "run", "short", "--until", "init", "--nproc", "2", "--threads", "1"],
            preexec_fn=lambda: os.close(1), stderr=said, cwd=tmp_path, timeout=120,
            env={**ENVIRONMENT, "PYTHONWARNINGS": "error::ResourceWarning"},
        )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "said").read_text() == ""
    assert not list(tmp_path.glob("stagerun-bug-*"))


LIMITS = {
    "files": (OSError(errno.EMFILE, "Too many open files"), "have 4096 open here", "ulimit -n"),
    "memory": (MemoryError(), "1.0 TB of address space here", "ulimit -v"),
    "allocator": (RuntimeError("DefaultCPUAllocator: can't allocate memory: you"), "1.0 TB of address", "ulimit -v"),
    "oneDNN": (RuntimeError("could not create a primitive"), "1.0 TB of address space here", "ulimit -v"),
    "random": (RuntimeError("Unable to open /dev/urandom"), "needs random numbers", "/dev/urandom in this container"),
}


@pytest.fixture
def limited() -> Iterator[None]:
    """What `ulimit -n` and `ulimit -v` say: enough for this process."""
    kinds = {resource.RLIMIT_NOFILE: 4096, resource.RLIMIT_AS: 10**12, resource.RLIMIT_FSIZE: 10**12}
    before = {kind: resource.getrlimit(kind) for kind in kinds}
    for kind, most in kinds.items():
        resource.setrlimit(kind, (most, before[kind][1]))
    yield
    for kind, each in before.items():
        resource.setrlimit(kind, each)


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_of_the_shell_is_not_a_bug(name: str, limited: None, tmp_path: Path) -> None:
    """Neither of the command nor of a worker."""
    error, what, hint = LIMITS[name]
    program = """
import sys
from stagerun.command.ending import end_with
from stagerun.launch.start import Orders, work
error = eval(sys.argv[1])
def job(*_):
    raise error
if sys.argv[2] == "worker":
    sys.exit(work(job, Orders(("run",), None)))
end_with(error)
"""
    for kind in ("worker", "command"):
        done = subprocess.run(
            [sys.executable, "-c", program, repr(error), kind], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60
        )  # fmt: skip
        said, _, told = done.stderr.partition("\n  hint: ")
        assert done.returncode == 74 and what in said and hint in told and not os.listdir(tmp_path), done.stderr


def test_without_a_limit_a_torch_that_fails_is_a_bug() -> None:
    assert of_surroundings(RuntimeError("CUDA out of memory")) is None
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert of_surroundings(RuntimeError("could not create a primitive")) is None


def test_the_limit_on_the_size_of_files_is_named(limited: None) -> None:
    failure = storage_failure(OSError(errno.EFBIG, "File too large"), "write x", Path("out"))
    assert failure.hint.startswith("files may have 1.0 TB at most here: raise that limit (ulimit -f)")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    failure = storage_failure(OSError(errno.EFBIG, "File too large"), "write x", Path("out"))
    assert failure.hint.startswith("the file system, or the limit")


def test_a_current_folder_that_is_gone_is_said_first(tmp_path: Path) -> None:
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
    assert done.stderr == "the current folder has been deleted\n  hint: `cd` to one that is there\n"
