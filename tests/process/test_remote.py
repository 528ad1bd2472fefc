"""`--hosts` as far as one machine shows it: a script in the place of ssh gives each host a name of its own. tests/cluster has the rest."""

import json
import os
import signal
from pathlib import Path

import processes
import pytest
import small


@pytest.fixture(scope="module")
def schedule(base):
    return base / "schedule"


def ssh_that(tmp_path: Path, *lines: str) -> str:
    """A command in the place of ssh, in which $host and $command say what it is to do."""
    script = tmp_path / "ssh"
    words = 'args=("$@"); host=${args[-2]}; command=${args[-1]}'
    script.write_text("\n".join(["#!/bin/bash", words, *lines]) + "\n")
    script.chmod(0o755)
    return str(script)


def test_why_hosts_are_missing_is_reported_of_each_and_no_secret_is_passed_on(schedule, tmp_path):
    ssh = ssh_that(
        tmp_path, f"[ $host = e ] && head -n 1 >{tmp_path}/said && exit 1", "case $host in",
        'a) echo "ssh: connect to host a port 22: No route to host" >&2; exit 255;;',
        "b) exit 200;;",
        "c) exit 201;;",
        "d) echo 'No module named stagerun' >&2; exit 1;;",
        "esac",
    )  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_DEBUG": "x"}
    done = small.stagerun("run", schedule, "--hosts", "a,b,c,d,e", "--ssh", ssh, "--out", tmp_path / "out", env=env)
    assert done.returncode == 69, done.stderr
    assert "a can't be reached: ssh: connect to host a port 22: No route to host\n  hint: `" in done.stderr
    assert f"b has no folder {Path.cwd()}" in done.stderr and "--sync" in done.stderr
    assert "c has no " in done.stderr and "at the same path" in done.stderr
    assert "has no stagerun" in done.stderr and not (tmp_path / "out").exists()
    passed = json.loads((tmp_path / "said").read_text())["environment"]
    assert passed["NCCL_DEBUG"] == "x" and "AWS_SECRET_ACCESS_KEY" not in passed


@pytest.mark.skipif(os.getuid() != 0, reason="gives hosts names of their own")
@pytest.mark.parametrize(
    "whom, number, code, said",
    [
        ("launcher", signal.SIGTERM, 75, ["everything is saved"]),
        ("b", signal.SIGKILL, 69, ["b is gone: its connection ended (rank 1)", "run the same command again"]),
        ("launcher", signal.SIGKILL, -signal.SIGKILL, []),
    ],
)
def test_a_job_that_is_stopped_or_loses_a_host_or_its_launcher(schedule, tmp_path, whom, number, code, said):
    """An endless run on hosts a and b, once it trains. Each process of a host leaves its number."""
    ssh = ssh_that(tmp_path, f"echo $$ > {tmp_path}/$host.pid", 'exec unshare -u sh -c "hostname $host; $command"')
    out = tmp_path / "out"
    run = small.start(schedule, out, "--hosts", "a,b", "--ssh", ssh, "--timeout", "iteration=10s", *small.ENDLESS)
    try:
        small.wait_for(out / "snapshots" / "init-00000004-a0001", run)
        os.kill(run.process.pid if whom == "launcher" else int((tmp_path / f"{whom}.pid").read_text()), number)
        ended, text = run.wait()
        assert ended == code and all(words in text for words in said), text
        assert run.gone(100 if code < 0 else 0), "every worker has ended"
    finally:
        processes.kill_all(run.pids())


def test_one_call_of_rsync_copies_the_schedule(schedule, tmp_path):
    (tmp_path / "rsync").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/typed\necho no room >&2\nexit 1\n')
    (tmp_path / "rsync").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["run", schedule, "--hosts", "user@far", "--out", tmp_path / "out"]
    done = small.stagerun(*words, "--sync", "~/x y", env=env)
    assert done.returncode == 69 and "user@far: the schedule can't be copied: no room" in done.stderr, done.stderr
    typed = (tmp_path / "typed").read_text().splitlines()
    assert typed[-2:] == [str(schedule), "user@far:x y/"]
    assert "--rsync-path=mkdir -p \"$HOME\"/'x y' && test -O \"$HOME\"/'x y' && rsync" in typed
    words[3] = "localhost"
    done = small.stagerun(*words, "--sync", "/proc/here", env=env)
    assert done.returncode == 69 and "localhost: the schedule can't be copied: mkdir: " in done.stderr
    done = small.stagerun(*words, "--sync", "here", env=env)
    assert done.returncode == 64 and "is not an absolute path" in done.stderr
