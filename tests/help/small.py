"""A tree of four stages and 17 small iterations: the least that shows what a whole run must show, in a few seconds."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import processes
import tiny
import warm

STAGES = {
    "init": 'base_lr: 0.1 lr_policy: "poly_cyc" power: 1 max_iter: 6 lr_iter: 12 warmup_iter: 2 warmup_start_lr: 0.01',
    "cyc1": 'base_lr: 0.06 lr_policy: "poly_cyc" power: 2 max_iter: 5 lr_iter: 10 test_interval: 4',
    "collapse": """base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 3 weight_decay: 2e-3 carry { momentum: KEEP }
transform_param { mirror: true mean_value: 73 scale: 0.0111 }""",
    "early": 'base_lr: 0.02 lr_policy: "poly" power: 2 max_iter: 3',
}


def make_schedule(folder: Path, data: Path, **stages: str) -> Path:
    """The solver files in `folder`, with other files for some stages. `data` as `tiny.make_data` makes it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = tiny.SCHEDULE.format(data=data, train=tiny.TRAIN_IMAGES, val=tiny.VAL_IMAGES)
    text = text[: text.index("stage {")]
    text = (
        text.replace("batch_size: 32", "batch_size: 16")
        .replace("snapshot: 3", "snapshot: 2")
        .replace("display: 5", "display: 1")
    )
    text += 'stage { name: "init" }\nstage { name: "cyc1" }\nstage { name: "collapse" }\nstage { name: "early" from: "init" }\n'
    (folder / "schedule.prototxt").write_text(text)
    for name, solver in {**STAGES, **stages}.items():
        (folder / f"{name}.prototxt").write_text(solver + "\n")
    return folder


def stagerun(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    fault: str = "",
    timeout: float = 400,
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """The command, to its end. Nothing it prints may look like a bug of ours. `fault`: as of `reliability.faults`. `code`: with which it
    must end."""
    done = warm.run(
        [*map(str, arguments)], cwd=cwd, env=env or {**os.environ, "OMP_NUM_THREADS": "1"}, fault=fault, timeout=timeout
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    assert done.returncode == code if code is not None else done.returncode != 70, done.stdout + done.stderr
    return done


def run(
    schedule: Path, out: Path, *arguments: object, nproc: int = 1, **options: object
) -> subprocess.CompletedProcess[str]:
    """`stagerun run` with one thread per worker."""
    return stagerun("run", schedule, "--out", out, "--nproc", nproc, "--threads", 1, *arguments, **options)


def start(
    schedule: Path, out: Path, *arguments: object, nproc: int = 1, environment: dict[str, str] | None = None
) -> processes.Run:
    words = ["run", schedule, "--out", out, "--nproc", nproc, "--threads", 1, *arguments]
    return processes.Run([str(word) for word in words], environment or {}).start()


# For a run that must not be over before it is stopped, however busy the machine is: its last stage has no end. With AGAIN
# the next run trains that stage as it is written, should the stop have come so late.
ENDLESS = ("--set", "early.max_iter=100000")
AGAIN = ("--redo", "early")


def wait_for(path: Path, run: processes.Run) -> None:
    """Returns when `path` exists. Fails when the run ends before."""
    processes.until(run, path.exists)
