"""`stagerun retry -- COMMAND`: start a launcher's command, look at what it left, and start it again while that helps."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
import psutil

from stagerun import store
from stagerun.base.errors import WORTH_ANOTHER_START, ExitCode, PeerError, ResumeRefused, UsageError
from stagerun.base.text import duration
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, filled, option
from stagerun.language import load
from stagerun.system import signals
from stagerun.system.process import die_with_parent
from stagerun.train.command import run
from stagerun.train.options import RunOptions
from stagerun.train.results import LIMIT

# Launchers, by prefixes of their executables, that pass SIGUSR1 on to all ranks and wait. SIGTERM ends some of them within a second.
_TAKES_USR1 = ("mpirun", "mpiexec", "orterun", "prterun", "srun")
# Exit codes of a run that is done, and those that another start would end with again.
_FINAL = set(ExitCode) - set(WORTH_ANOTHER_START)
_LONGEST_WAIT_S = 60.0
_FREE_S = 60.0  # ranks need a moment to see that their launcher is gone
_END_S = 5.0  # from a second Ctrl-C to SIGKILL
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RetryOptions:
    command: tuple[str, ...] = argument("-- COMMAND...", type=click.UNPROCESSED, nargs=-1)
    max_restarts: int | None = option(
        "--max-restarts N", "Start it again N times at most.  [default: until three starts make no progress]", least=0
    )


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def retry(options: RetryOptions) -> int:
    """Runs COMMAND, and runs it again when a worker, a host or a disk was lost.

    For launchers that end all ranks when one dies: `stagerun retry -- mpirun -np 4 stagerun run DIR`, and the same with srun or torchrun; in
    a script, put `stagerun retry --` before the launcher. The exit codes of launchers say little, so retry reads how the run itself ended.
    It ends when the run is done; when the run was asked to stop and has saved (75); with an error that another start can't mend; and with
    78 after three starts without progress. A signal reaches the launcher as SIGUSR1 (torchrun and others: SIGTERM), so that the run saves.
    """
    with signals.held():  # polled, so that none interrupts a look at the folder
        out = _output_folder(options.command)
        started, restarts = _Command(options.command), Restarts(options.max_restarts)
        before = _newest_life(out)
        while not started.stopped_within(restarts.wait if restarts.count else 0):
            code = started.run()
            deadline = time.monotonic() + _FREE_S
            while store.holder(out) is not None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            newest = _newest_life(out)
            life = newest if newest is not None and (before is None or newest.attempt > before.attempt) else None
            final, why = judge(code, life)
            if final is not None:
                return final
            if started.stop is not None:
                if life is not None and life.code != ExitCode.SAVED:
                    raise PeerError(f"stopped, but {why}", "run it again: it resumes from the newest snapshot")
                break
            # A life that began from something else than the previous one shows progress of that one.
            restarts.next(life is not None and (before is None or life.newest != before.newest), why)
            before = newest
            tell(f"restart {restarts.count} in {duration(restarts.wait)}: {why}")
    return ExitCode.SAVED  # the lives have saved what they could


@dataclass(slots=True)
class Restarts:
    """The limits on starting a command again. `most`: --max-restarts."""

    most: int | None
    count: int = 0
    idle: int = 0  # starts since the last progress
    wait: float = 1.0

    def next(self, further: bool, why: str) -> None:
        """Count another start, and set how long to `wait` before it. `further`: training has made progress. ResumeRefused, PeerError at a
        limit."""
        self.idle = 0 if further else self.idle + 1
        if self.most is None and self.idle >= LIMIT:
            # Not PeerError: a batch script would answer its exit code by starting the same again.
            hint = "try the command without `stagerun retry`; --max-restarts N replaces this limit"
            raise ResumeRefused(f"{LIMIT} starts in a row made no progress: {why}", hint)
        if self.count == self.most:
            raise PeerError(f"{why}; --max-restarts {self.most} is used up")
        self.count += 1
        self.wait = 1.0 if further else min(2 * self.wait, _LONGEST_WAIT_S)


def judge(code: int, life: store.Life | None) -> tuple[int | None, str]:
    """Return the exit code to end with, None for another start, and why this start ended. `code`: of COMMAND, as a shell has it;
    `life`: the record that the run left, None if it had not started."""
    ended = f"the command ended with exit code {code}"
    if life is None:
        if code in _FINAL:
            return code, ""
        if code in (126, 127):  # a shell can't execute or find it
            return ExitCode.RECIPE, ""
        return None, f"{ended} before the run had started"
    if life.code is None:
        return None, f"the run was killed ({ended})"
    if life.code in _FINAL:
        return life.code, ""
    if life.code == ExitCode.SAVED:
        # A launcher that lost a rank stops the others by the signal that a person sends, but ends with another code.
        return (ExitCode.SAVED, "") if code == ExitCode.SAVED else (None, f"the run was stopped, and saved ({ended})")
    meaning = next((code.meaning for code in ExitCode if code == life.code), "unknown")
    return None, f"the run ended with {life.code}: {meaning.partition(';')[0]}"


# -- the run in the command


def words_of_run(command: Sequence[str]) -> list[str] | None:
    """Return the words after `stagerun run`, also of `python -m stagerun run`; None if the command has none."""
    for at in range(len(command) - 1):
        if os.path.basename(command[at]) == "stagerun" and command[at + 1] == "run":
            return list(command[at + 2 :])
    return None


def _output_folder(command: Sequence[str]) -> Path:
    """Return where the run in the command writes. Raise its mistakes: a launcher may hide their exit code."""
    words = words_of_run(command)
    if words is None:
        raise UsageError(
            f"`{' '.join(command)}` has no `stagerun run DIR`",
            "retry starts the launcher itself: in a script, put `stagerun retry --` before the launcher",
        )
    try:
        with run.make_context("stagerun run", words, help_option_names=["-h", "--help"]) as context:
            task = filled(RunOptions, context.params)
    except click.exceptions.Exit as error:
        raise UsageError("COMMAND asks `stagerun run` for its help", "leave --help out") from error
    return task.output(load(task.folder, task.overrides))


def _newest_life(out: Path) -> store.Life | None:
    return next(iter(store.last_lives(store.LocalDisk(), out, 1)), None)


# -- the command's process, and signals


class _Command:
    """A command and its process. `stop`: the first stop signal that this process got; they are blocked, and polled here."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.stop: signal.Signals | None = None

    def run(self) -> int:
        """Run the command to its end, and return its exit code. A stop signal is passed on; a second Ctrl-C ends everything."""
        try:
            # A separate session: Ctrl-C at the terminal would reach the launcher too, which may kill its ranks.
            process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_release_and_follow
            )
        except OSError as error:
            raise UsageError(f"`{self.words[0]}` can't be started: {error.strerror}") from error
        while (code := process.poll()) is None:
            number = _next_signal(_POLL_S)
            if number is not None and self.stop is None:
                self.stop = number
                tell(f"{number.name}: the command is asked to stop")
                with suppress(OSError):
                    os.kill(*receiver(process.pid))
            elif number == self.stop == signal.SIGINT:
                _end(process)
                signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")
        return code if code >= 0 else 128 - code

    def stopped_within(self, seconds: float) -> bool:
        """Wait, and return whether a stop signal came."""
        self.stop = _next_signal(seconds)
        return self.stop is not None


def _next_signal(seconds: float) -> signal.Signals | None:
    info = signal.sigtimedwait(signals.stop_signals(), seconds)
    return signal.Signals(info.si_signo) if info is not None else None


def _release_and_follow() -> None:
    """Set up the command's process: unblock signals, and end it when this process is killed."""
    signals.release()
    die_with_parent(signal.SIGTERM)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(OSError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def receiver(pid: int) -> tuple[int, signal.Signals]:
    """Return the process, `pid` or the nearest below it, that makes all ranks save, and the signal to send: an MPI launcher or srun, else
    whatever has `stagerun run` among its words, as torchrun has."""
    trains = None
    family = [psutil.Process(pid)]
    for process in family:  # grows by the children of each
        with suppress(psutil.Error):  # a process that has just ended
            family += process.children()
            # The executable: a process of a shell script has the script's name, which may be `mpirun`.
            if os.path.basename(process.exe()).startswith(_TAKES_USR1):
                return process.pid, signal.SIGUSR1
            if trains is None and words_of_run(process.cmdline()) is not None:
                trains = process.pid
    return trains or pid, signal.SIGTERM
