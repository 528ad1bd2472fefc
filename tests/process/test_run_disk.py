"""A disk that fills up, cores that are bound, bad input: what the command says, and that the same command goes on."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import processes
import pytest
import small
import tiny
from facade import caffe_pb2, write_lmdb

SIZE_MB = 14  # of the disk; a snapshot of the small model takes 2.5 MB
BALLAST_MB = 10.3  # one fits beside it


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of SIZE_MB. Skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_full(disk, finished):
    schedule, out, ballast = finished / "schedule", disk / "out", disk / "ballast"
    ballast.write_bytes(bytes(int(BALLAST_MB * 1e6)))
    full = small.run(schedule, out, code=74)
    # A periodic snapshot that fails is a warning; the stage's last one is needed.
    assert "warning: no snapshot of init at 4" in full.stdout
    assert "init  6/6" in full.stdout, "training went on"
    assert "No space left on device" in full.stderr and "free some space" in full.stderr
    assert sorted(processes.content(out)) == ["init-00000002"]

    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    again = small.run(schedule, out, code=0)
    assert "init: iterations 2 to 6" in again.stdout and "BIT-EXACT" in again.stdout
    assert processes.ends(out) == processes.ends(finished / "out")


# -- `run --bind`: real workers, their threads seen in /proc where the plan puts them, and the same bits as unbound


def threads(pid: int) -> dict[int, tuple[str, str]]:
    """Name and allowed CPUs of each of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            told = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
            name = "main" if folder.name == str(pid) else told["Name"]
            found[int(folder.name)] = (name, told["Cpus_allowed_list"])
    return found


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is allowed: nothing can be told apart")
def test_threads_are_where_the_plan_says(base, tmp_path):
    """One core for each worker: its main thread and gloo's are on it, and on no other's."""
    two = sorted(os.sched_getaffinity(0))[:2]
    only_two = f"import os, sys; os.sched_setaffinity(0, {two}); os.execv(sys.argv[1], sys.argv[1:])"
    words = ["run", base / "schedule", "--out", tmp_path / "out", "--nproc", 2, "--threads", 1, "--bind", "numa"]
    run = processes.Run([str(word) for word in words]).start(within=[sys.executable, "-c", only_two])
    last: dict[tuple[int, int], tuple[str, str]] = {}  # by rank and thread
    while run.process.poll() is None:
        for rank, pid in run.ranks().items():
            last |= {(rank, thread): said for thread, said in threads(pid).items()}
        time.sleep(0.05)
    assert run.wait()[0] == 0
    for rank, cpu in enumerate(two):
        for wanted in ("main", "gloo_tcp_loop", "pt_gloo_runloop"):
            assert {cpus for (r, _), (name, cpus) in last.items() if (r, name) == (rank, wanted)} == {str(cpu)}, wanted
    notes = [line["text"] for line in processes.events(tmp_path / "out", "Note")]
    assert "bound to cores: rank 0 to 1 CPU of NUMA node 0; rank 1 to 1 CPU of NUMA node 0" in notes
    assert small.run(base / "schedule", tmp_path / "unbound", nproc=2).returncode == 0
    assert processes.content(tmp_path / "out") == processes.content(tmp_path / "unbound")


# -- Bad input through the command: one clear message, the right exit code. More are in tests/cases/trained/first_second.txt


def records(folder: Path, count: int, special: int, value: bytes) -> None:
    """folder/train_lmdb and val_lmdb of grey squares, `value` in place of record `special` of the first."""
    plain = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(range(196)) * 4, label=3).SerializeToString()
    write_lmdb(str(folder / "train_lmdb"), [value if i == special else plain for i in range(count)])
    write_lmdb(str(folder / "val_lmdb"), [plain] * tiny.VAL_IMAGES)


def told(done: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """One message, at the end and on stderr only, that holds the texts."""
    assert done.returncode == code, done.stdout + done.stderr
    for text in texts:
        assert done.stderr.count(text) == 1, done.stderr
    assert "rank 1:" not in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_output_folder_of_somebody_else(base, tmp_path):
    program = (
        "import os, sys, stagerun.train.command; from stagerun.cli import main; from stagerun.language import load; "
        f"schedule = {str(base / 'schedule')!r}; sys.argv = ['stagerun', 'run', schedule, '--out', {str(tmp_path / 'o')!r}]; "
        # read while it is allowed: pytest's folders are root's alone
        "loaded = load(schedule, ()); stagerun.train.command.load = lambda *_: loaded; "
        "os.setgid(65534); os.setuid(65534); main()"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    told(done, 77, "ask its owner for permission")


def test_a_label_out_of_range_met_in_training_is_reported_once_by_two_workers(base, tmp_path):
    datum = caffe_pb2.Datum(channels=1, height=28, width=28, data=bytes(784), label=10).SerializeToString()
    records(tmp_path, tiny.TRAIN_IMAGES, 8, datum)  # preflight looks at 0, 19, 39, ...
    schedule = small.make_schedule(
        tmp_path / "schedule", tmp_path, init='base_lr: 1e-3 lr_policy: "fixed" max_iter: 200'
    )
    done = small.run(schedule, tmp_path / "out", nproc=2)
    told(done, 65, "train_lmdb: record `00000008`: the label is 10, but num_classes is 10")
    assert len(done.stderr.splitlines()) == 2, done.stderr
