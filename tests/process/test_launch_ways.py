"""How our launcher starts workers, and what it leaves."""

import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import small

# `PYTHON -m stagerun` becomes `PYTHON SCRIPT`.
SHIFTED = 'python=$1; shift 3; exec "$python" "$0" "$@"'


def test_files_in_the_current_folder_are_not_executed(base: Path, tmp_path: Path) -> None:
    """Nor do the threads of libraries, as there are where the environment doesn't limit them, take the launcher's signals."""
    for name in ("selectors", "json", "logging"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the user was executed')\n")
    out = tmp_path / "out"
    words = ["run", base / "schedule", "--out", out, "--nproc", 2, "--threads", 1, *small.ENDLESS]
    # As the installed `stagerun` does, which doesn't search the current folder.
    script = tmp_path / "bin" / "stagerun"
    script.parent.mkdir()
    script.write_text("from stagerun.__main__ import main\nmain()\n")
    run = processes.Run([str(word) for word in words], {"OPENBLAS_NUM_THREADS": "4"})
    run.start(["env", "-u", "OMP_NUM_THREADS", "-C", str(tmp_path), "sh", "-c", SHIFTED, str(script)])
    try:
        small.wait_for(out / "snapshots" / "init-00000002-a0001", run)
        status = [(task / "status").read_text() for task in Path(f"/proc/{run.process.pid}/task").iterdir()]
        blocked = [int(re.findall(r"^SigBlk:\s*(\S+)", text, re.M)[0], 16) for text in status]
        assert len(blocked) > 1, "those of numpy's library, too"
        assert sum(not mask >> (signal.SIGTERM - 1) & 1 for mask in blocked) <= 1, "but the main one"
    finally:
        processes.kill_all(run.pids())
        said = run.wait()[1]
    assert "was executed" not in said


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_temporary_files_where_no_inodes_are_left(base: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    for inodes in (2, 4):
        words = [
            sys.executable,
            "-m",
            "stagerun",
            "run",
            base / "schedule",
            "--out",
            tmp_path / f"out{inodes}",
            "--nproc",
            "2",
        ]
        mounted = f"mount -t tmpfs -o nr_inodes={inodes},size=10m none {there} && TMPDIR={there} exec {shlex.join(map(str, words))}"
        done = subprocess.run(["unshare", "-m", "sh", "-c", mounted], capture_output=True, text=True, timeout=120)
        assert done.returncode == 74, done.stderr
        assert f"of {inodes} inodes are left" in done.stderr and "bug of stagerun" not in done.stderr, done.stderr
        assert "said nothing" not in done.stderr, done.stderr


def test_what_a_killed_launcher_left_goes_with_the_next_run(base: Path, tmp_path: Path) -> None:
    left, held, link = (tmp_path / f"stagerun-run-{n}" for n in ("left", "held", "link"))
    beside, new = tmp_path / "beside", tmp_path / ".stagerun-run-new"  # just being made, and not locked yet
    for folder in (left, new, held, beside):
        folder.mkdir(0o700)
        (folder / "logs").mkdir()
    link.symlink_to(beside)  # who may write to /tmp can make one, to any folder of ours
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # of a launcher in another container that shares /tmp
    small.run(base / "schedule", tmp_path / "out", "--only", "init", env={**os.environ, "TMPDIR": str(tmp_path)})
    os.close(lock)
    assert not left.exists() and new.exists()
    assert link.is_symlink() and (beside / "logs").exists() and (held / "logs").exists()
