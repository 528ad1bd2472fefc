"""`stagerun run --nproc N`: N workers on this machine, through torchrun's own agent.

Each worker is the same command again with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. It writes how it ended
into a report folder, so that one clear message comes out, and not one from each worker and one from the agent.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagerun.errors import ExitCode
from stagerun.launch.signals import stop_signals

FOLDER_PREFIX = "stagerun-launch-"
REPORT_DIR = "STAGERUN_REPORT_DIR"
LAUNCHER_PID = "STAGERUN_LAUNCHER_PID"

# Seconds that workers have, after a signal, to finish an iteration and write a snapshot. An iteration of a large batch on a
# few processors takes minutes; who can't wait sends a second SIGINT.
GRACE_S = 600


@dataclass(frozen=True, slots=True)
class Report:
    """How a worker ended. `text` is what it would have told the user."""

    rank: int
    code: int
    text: str


def report(rank: int, code: int, text: str) -> bool:
    """Leaves a worker's end for the launcher. False when no launcher of ours waits for it."""
    folder = os.environ.get(REPORT_DIR)
    if folder is None:
        return False
    try:
        (Path(folder) / f"{rank}.json").write_text(json.dumps({"code": code, "text": text}))
    except OSError:
        return False  # the launcher is gone, and its folder with it: tell the terminal instead
    return True


def anybody_ended() -> bool:
    """Whether a worker of this launch has left its report already."""
    folder = os.environ.get(REPORT_DIR)
    return folder is not None and any(Path(folder).glob("*.json"))


def run_workers(command: Sequence[str], nproc: int, threads: int) -> tuple[int, str]:
    """Runs `python -m stagerun COMMAND...` in `nproc` workers and waits. Main thread only: the workers die with the
    thread that started them (PR_SET_PDEATHSIG).

    The exit code for the user, and what to say on stderr. The signals of `stop_signals` are passed
    on; the workers then have GRACE_S seconds.
    """
    # Before the import, which sets up torch's loggers: the agent reports every worker's end in its own words.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic")
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    os.environ[REPORT_DIR] = str(folder)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # All workers are here, so they meet on the loopback device, whatever this host's name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),
        signals_to_handle=",".join(s.name for s in stop_signals()),
        shutdown_timeout=GRACE_S,
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "stagerun", *command)
        return ExitCode.DONE, ""
    except ChildFailedError as error:
        deaths = {rank: failure.exitcode for rank, failure in error.failures.items()}
        return verdict(_reports(folder, nproc), deaths)
    except SignalException as error:
        ended = _reports(folder, nproc)
        if len(ended) < nproc:
            name = signal.Signals(error.sigval).name
            return (
                ExitCode.PEER,
                f"{name}: {nproc - len(ended)} of {nproc} workers ended without saving; run the same command again",
            )
        return verdict(ended, {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _silence(package: str) -> None:
    """Turns off the loggers of a package's modules. Each has a level of its own, so that of the package is not enough."""
    for name in [package, *logging.root.manager.loggerDict]:
        if name == package or name.startswith(f"{package}."):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _sweep() -> None:
    """Removes the report folders of launchers of this user that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        try:
            if pid.isdigit() and folder.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another launcher was faster


def _reports(folder: Path, nproc: int) -> list[Report]:
    found = []
    for rank in range(nproc):
        try:
            data = json.loads((folder / f"{rank}.json").read_text())
            found.append(Report(rank, data["code"], data["text"]))
        except (OSError, ValueError, KeyError):
            continue  # killed before or while it wrote
    return found


def verdict(reports: Sequence[Report], deaths: dict[int, int]) -> tuple[int, str]:
    """The one exit code and message for all workers.

    A worker that only lost its peers is not the cause; one that met an error of its own is, then one that was killed. A
    worker with nothing to say leaves it to the one that raised the error (`runner.together`).
    `deaths`: exit codes by rank as the agent saw them, negative for a signal.
    """
    causes = [r for r in reports if r.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER)]
    if causes:
        telling = [r for r in causes if r.text] or causes
        worst = telling[0]
        same = all(r.text == worst.text for r in telling)
        return worst.code, worst.text if same else "\n".join(f"rank {r.rank}: {r.text}" for r in telling)
    if any(r.rank == 0 for r in reports) and all(r.code == ExitCode.DONE for r in reports):
        return ExitCode.DONE, ""  # everything is on disk; what came then, a signal or a kill, was too late to matter
    told = {r.rank for r in reports if r.code != ExitCode.DONE}
    killed = {rank: code for rank, code in deaths.items() if code < 0 and rank not in told}
    if killed:
        # The agent ends those that are left with SIGTERM: another signal tells more.
        rank, code = min(killed.items(), key=lambda death: (death[1] == -signal.SIGTERM, death[0]))
        return ExitCode.PEER, (
            f"worker {rank} was killed by {signal.Signals(-code).name}\n"
            "  hint: run the same command again: it goes on from the newest snapshot"
        )
    peers = [r for r in reports if r.code == ExitCode.PEER]
    if peers:
        return ExitCode.PEER, peers[0].text
    if any(r.code == ExitCode.SAVED for r in reports):
        return ExitCode.SAVED, ""
    rank, code = min(deaths.items(), default=(0, ExitCode.BUG))
    return (code if code > 0 else ExitCode.BUG), f"worker {rank} ended with exit code {code} and said nothing"
