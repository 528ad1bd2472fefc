"""`stagerun sbatch` on a real Slurm: a run gets as many allocations as it needs, and no job is queued again that shouldn't be."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import processes
import pytest

from cluster import jobs
from cluster.slurm import Slurm
from stagerun.tools.sbatch import SbatchOptions, script

pytestmark = pytest.mark.cluster


def sbatch(slurm: Slurm, schedule: Path, out: Path, *more: object) -> subprocess.CompletedProcess[str]:
    """As a user does, on the head."""
    words = ["sbatch", *jobs.words(schedule, out)[1:], *map(str, more)]
    at = words.index("--threads")
    threads = [words.pop(at), words.pop(at)]
    return slurm.head.run(*jobs.STAGERUN, *words, "--", *threads, env={**slurm.env, **jobs.ENVIRONMENT})


def submit(slurm: Slurm, schedule: Path, out: Path, *more: object) -> int:
    """The job's number."""
    done = sbatch(slurm, schedule, out, *more)
    assert done.returncode == 0, done.stderr
    file = Path(f"{out}.sbatch")
    file.write_text(done.stdout)
    queued = slurm.head.run("sbatch", "--parsable", file, env={**slurm.env, **jobs.ENVIRONMENT}, check=True)
    return int(queued.stdout)


def said(out: Path, number: int) -> str:
    return Path(f"{out}.slurm-{number}.out").read_text()


def workers(slurm: Slurm) -> list[int]:
    """The ranks of a job, as numbered outside; not their monitors, nor what started them."""
    found = [item for host in slurm.cluster.hosts if host.life for item in host.processes("stagerun run").items()]
    return [pid for pid, line in found if re.match(r"\S*python\S* (\S+ )*\S*stagerun run ", line)]


def end_allocation(slurm: Slurm, number: int, out: Path, ranks: int) -> None:
    """Brings the job's time limit so near that Slurm sends the signal of --signal-before 2m, which it does at a look every 30 s. Until
    then the ranks stand still, so that it finds them where they are now; it wakes them itself."""
    pids, before = workers(slurm), said(out, number).count("SIGUSR1: ")
    assert len(pids) == ranks, [host.processes() for host in slurm.cluster.hosts]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    hours, minutes, _ = map(int, slurm.job(number)["RunTime"].split(":"))
    slurm.run("scontrol", "update", f"jobid={number}", f"timelimit={60 * hours + minutes + 2}")
    until = time.monotonic() + 60
    while said(out, number).count("SIGUSR1: ") == before:
        assert time.monotonic() < until, "no SIGUSR1"
        time.sleep(0.1)


def wait_restarted(slurm: Slurm, number: int, times: int) -> None:
    until = time.monotonic() + 120
    while int((job := slurm.job(number))["Restarts"]) < times or job["JobState"] != "RUNNING":
        assert time.monotonic() < until and job["JobState"] not in ("COMPLETED", "FAILED"), job
        slurm.hurry(number, job, "timelimit=30")
        time.sleep(0.3)


def test_a_run_that_needs_three_allocations_takes_three(slurm, schedule, reference, tmp_path):
    out = tmp_path / "out"
    number = submit(slurm, schedule, out, "--nodes", 3, "--time", "30m", "--signal-before", "2m")
    for times, (stage, iter) in enumerate((("cyc2", 4), ("collapse", 2))):
        jobs.wait_for(out, stage, iter)
        end_allocation(slurm, number, out, 3)
        wait_restarted(slurm, number, times + 1)
    job = slurm.wait(number, ("COMPLETED", "FAILED", "CANCELLED"))
    text = said(out, number)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "2", text
    assert text.count("queued again: exit code 75") == 2
    assert re.findall(r"allocation (\d) of job", text) == ["1", "2", "3"]
    assert "BIT-EXACT" in text and "EQUIVALENT" not in text
    assert "snapshot cyc2-0000000" in text and re.search(r"stage 3/5 cyc2: iterations [1-7] to 8", text), text
    assert processes.ends(out) == reference
    assert not jobs.nothing_left(slurm.cluster)
    again = sbatch(slurm, schedule, out, "--nodes", 3, "--time", "30m")
    assert again.returncode == 78 and "all is done" in again.stderr, again.stderr


@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_lost_node_is_replaced(slurm, schedule, tmp_path, lost):
    """node1: where the batch script runs, and rank 0."""
    out = tmp_path / "out"
    number = submit(slurm, schedule, out, "--nodes", 2, "--time", "30m")
    jobs.wait_for(out, "cyc1", 5)
    assert slurm.job(number)["NodeList"] == "node[1-2]"
    slurm.cluster[lost].power_off()
    wait_restarted(slurm, number, 1)
    job = slurm.wait(number, ("COMPLETED", "FAILED", "CANCELLED"))
    text = said(out, number)
    left = {"node1": "node[2-3]", "node2": "node[1,3]"}
    assert job["JobState"] == "COMPLETED" and job["NodeList"] == left[lost], f"{job['NodeList']}\n{text}"
    assert processes.ends(out) == jobs.locally(schedule, tmp_path / "local", 2)


# -- what the script does with an end that only Slurm brings about: no training


def queue(slurm: Slurm, folder: Path, program: str, name: str = "x", **values: Any) -> tuple[int, Path]:
    """A job whose two ranks, on one node, are `program` of bash."""
    values = {"workers_per_node": 2, "nodes": 1, "cpus_per_worker": 1, "time": 600, "signal_before": 60, **values}
    options = SbatchOptions(folder=str(folder), **values)
    text = script(options, name, ["A test."], ["bash", "-c", program], str(folder / name))
    file = folder / f"{name}.sbatch"
    file.write_text(text)
    return slurm.submit(file), folder / name


def ended(slurm: Slurm, number: int, restarts: int) -> str:
    """The job's state once it has stood still for a while, restarted so often."""
    job = slurm.wait(number, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"))
    time.sleep(1)
    assert slurm.job(number)["JobState"] == job["JobState"], "queued again after all"
    assert int(job["Restarts"]) == restarts, job
    return f"{job['JobState']} {job['ExitCode'].partition(':')[0]}"


# Ranks that save when they are told to.
_SAVES = 'trap "sleep 1; exit 75" TERM USR1; touch {out}.$SLURM_PROCID; for i in $(seq 6000); do sleep 0.1; done'


def begun(out: Path) -> None:
    until = time.monotonic() + 60
    while not (Path(f"{out}.0").exists() and Path(f"{out}.1").exists()):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_cancelled_job_is_over(slurm, tmp_path):
    number, out = queue(slurm, tmp_path, _SAVES.format(out=tmp_path / "x"))
    begun(out)
    slurm.run("scancel", number)
    assert ended(slurm, number, 0).startswith("CANCELLED"), said(out, number)
    assert "queued again" not in said(out, number)


def test_a_preempted_job_goes_on_later(slurm, tmp_path):
    program = _SAVES.format(out=tmp_path / "x")
    number, out = queue(slurm, tmp_path, program, nodes=3, cpus_per_worker=None, partition="low")
    begun(out)
    other = slurm.submit("-p", "high", "-N3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3", cwd=tmp_path)
    slurm.wait(other, ("COMPLETED",), timeout=90)
    wait_restarted(slurm, number, 1)
    slurm.run("scancel", number)
    assert ended(slurm, number, 1).startswith("CANCELLED")
