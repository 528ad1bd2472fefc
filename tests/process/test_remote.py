"""`--hosts` as far as one machine shows it: a script in the place of ssh gives each host a name of its own. tests/cluster has the rest."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import processes
import pytest
import small
from facade import UsageError

from stagerun.base.caffe_file import state_bytes
from stagerun.language import load
from stagerun.launch.hostfile import Host
from stagerun.launch.ssh import Way, passed_on, sync_of
from stagerun.system import process


@pytest.fixture(scope="module")
def schedule(base: Path) -> Path:
    return base / "schedule"


def ssh_that(tmp_path: Path, *lines: str) -> str:
    """A command in the place of ssh, in which $host and $command say what it is to do."""
    script = tmp_path / "ssh"
    words = 'args=("$@"); host=${args[-2]}; command=${args[-1]}'
    script.write_text("\n".join(["#!/bin/bash", words, *lines]) + "\n")
    script.chmod(0o755)
    return str(script)


def test_why_hosts_are_missing_is_reported_of_each(schedule: Path, tmp_path: Path) -> None:
    ssh = ssh_that(
        tmp_path, "case $host in",
        'a) echo "ssh: connect to host a port 22: No route to host" >&2; exit 255;;',
        "b) exit 200;;",
        "c) exit 201;;",
        "d) echo 'No module named stagerun' >&2; exit 1;;",
        "esac",
    )  # fmt: skip
    done = small.stagerun("run", schedule, "--hosts", "a,b,c,d", "--ssh", ssh, "--out", tmp_path / "out")
    assert done.returncode == 69, done.stderr
    assert "a can't be reached: ssh: connect to host a port 22: No route to host\n  hint: `" in done.stderr
    assert f"b has no folder {Path.cwd()}" in done.stderr and "--sync" in done.stderr
    assert "c has no " in done.stderr and "at the same path" in done.stderr
    assert "has no stagerun" in done.stderr and not (tmp_path / "out").exists()


class Job:
    """An endless run on hosts a and b, once it trains. Each process of a host leaves its number."""

    def __init__(self, schedule: Path, tmp_path: Path) -> None:
        ssh = ssh_that(tmp_path, f"echo $$ > {tmp_path}/$host.pid", 'exec unshare -u sh -c "hostname $host; $command"')
        out = tmp_path / "out"
        words = ["run", str(schedule), "--hosts", "a,b", "--nproc", "1", "--ssh", ssh]
        words += ["--out", str(out), "--threads", "1", *small.ENDLESS]
        self.run = processes.Run(words).start()
        small.wait_for(out / "snapshots" / "init-00000004-a0001", self.run)
        self.pids = {host: int((tmp_path / f"{host}.pid").read_text()) for host in "ab"}

    def end(self) -> tuple[int, str]:
        ended = self.run.wait()
        assert not self.run.pids(), "every worker has ended"
        return ended[0], ended[1]


@pytest.fixture
def job(schedule: Path, tmp_path: Path) -> Iterator[Job]:
    if os.getuid() != 0:
        pytest.skip("gives hosts names of their own")
    made = Job(schedule, tmp_path)
    yield made
    processes.kill_all(made.run.pids())


def test_a_stop_saves_on_all_hosts(job: Job) -> None:
    job.run.process.send_signal(signal.SIGTERM)
    code, said = job.end()
    assert code == 75 and "everything is saved" in said, said


def test_a_host_that_dies_ends_the_others(job: Job) -> None:
    os.kill(job.pids["b"], signal.SIGKILL)
    code, said = job.end()
    assert code == 69 and "b is gone: its connection ended (rank 1)" in said, said
    assert "run the same command again" in said


def test_workers_end_with_a_killed_launcher(job: Job) -> None:
    left = set(job.run.pids()) - {job.run.process.pid}
    job.run.process.kill()
    job.run.wait()
    last = time.monotonic() + 100
    while [pid for pid in left if process.living(pid) is not None]:
        assert time.monotonic() < last
        time.sleep(0.1)


def test_no_secret_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG", "STAGERUN_REPORT_DIR", "RANK"):
        monkeypatch.setenv(name, "x")
    assert {"NCCL_DEBUG"} == {"AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG", "STAGERUN_REPORT_DIR", "RANK"} & set(passed_on())


def test_one_call_of_rsync_copies_the_schedule_and_the_files_that_it_names(tmp_path: Path) -> None:
    made = tmp_path / "here" / "made"
    made.mkdir(parents=True)
    (made / "schedule.prototxt").write_text(
        """
        model { name: "resnet_small" num_classes: 2 }
        data { train { source: "/data/train" images: 10 labels: "../labels.txt" } }
        solver { loss { type: BINARY } batch_size: 2 device_batch_size: 2 base_lr: 0.1 lr_policy: "fixed" max_iter: 2 transform_param { crop_size: 28 } }
        stage { name: "far" solver_param { weights { file: "/data/far.pt" } } }
        stage { name: "run" solver_param { weights { file: "../out:trunk" } } }
        stage { name: "gone" solver_param { weights { file: "../gone.pt" } } }
        stage { name: "init" solver_param { weights { file: "../weights/net.pt" } } }
        stage { name: "on" from: "" solver_param { solverstate: "../weights/x.solverstate" } }
        """
    )
    weights = tmp_path / "here" / "weights"
    (weights / "deep").mkdir(parents=True)
    (weights / "x.solverstate").write_bytes(state_bytes(1, "deep/x.caffemodel", []))
    for file in (weights / "deep" / "x.caffemodel", weights / "net.pt", tmp_path / "here" / "labels.txt"):
        file.write_text("0 1\n")
    sync = sync_of("~/x y", str(made), load(made))
    here = f"{tmp_path}/here/./"
    names = ["labels.txt", "made", "weights/deep/x.caffemodel", "weights/net.pt", "weights/x.solverstate"]
    assert sorted(sync.sources) == [here + name for name in names]
    words = Way(sync=sync).copy(Host("user@far"))
    assert words[0] == "rsync" and words[-1] == "user@far:x y/"
    assert "--rsync-path=mkdir -p \"$HOME\"/'x y' && test -O \"$HOME\"/'x y' && rsync" in words
    with pytest.raises(UsageError, match="is not an absolute path"):
        sync_of("here", str(made), load(made))
