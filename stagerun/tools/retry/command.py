"""`stagerun retry`: starts a command that trains under a launcher, looks at what it left, and starts it again while that is worth it."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import click
import psutil

from stagerun import store
from stagerun.base.errors import (
    ExitCode,
    FolderInUseError,
    ResumeRefused,
    StorageError,
    UsageError,
)
from stagerun.base.recipe import Schedule
from stagerun.base.text import duration
from stagerun.command.ending import tell
from stagerun.command.options import argument, command, filled, option
from stagerun.command.shared import output_folder
from stagerun.data.weights import looked_at
from stagerun.language import load
from stagerun.system import signals
from stagerun.system.process import die_with_parent, lives, living
from stagerun.train import results
from stagerun.train.command import run
from stagerun.train.first_look import DISK, whole_plan
from stagerun.train.options import RunOptions
from stagerun.train.results import LIMIT, require_progress, standing

# Launchers, by the beginnings of their names, that hand SIGUSR1 on to all ranks and wait; SIGTERM ends some of them within a second.
_TAKES_USR1 = ("mpirun", "mpiexec", "orterun", "prterun", "srun")
# Programs that a signal ends, and not what they have started.
_SHELLS = {"bash", "sh", "dash", "zsh", "ksh", "mksh", "fish", "tcsh", "csh", "busybox", "time"}
# Codes that another start would not mend.
_FINAL = {
    ExitCode.RECIPE,
    ExitCode.DATA,
    ExitCode.BUG,
    ExitCode.IN_USE,
    ExitCode.PERMISSION,
    ExitCode.RESUME_REFUSED,
    ExitCode.DIVERGED,
    ExitCode.INTERRUPTED,
}
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127  # of a shell
_LONGEST_WAIT_S = 60.0
# Ranks that a launcher has left may need a moment to see that it is gone.
_FOLDER_S = 60.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RetryOptions:
    command: tuple[str, ...] = argument("-- COMMAND...", type=click.UNPROCESSED, nargs=-1)
    max_restarts: int | None = option(
        "--max-restarts N", "Start it again N times at most.  [default: as long as it gets further]", least=0
    )
    schedule: str | None = option(
        "--schedule DIR",
        "The schedule that COMMAND runs, where it does so in a script.  [default: found in COMMAND's words]",
    )
    out: str | None = option("--out FOLDER", "Its output folder.  [default: found in COMMAND's words]")


@dataclass(frozen=True, slots=True)
class Ended:
    """How one start ended. `life`: the exit code that the run itself has left, None where it was cut off; `began`: it has
    left anything. `code`: of COMMAND, negative for a signal."""

    began: bool
    life: int | None
    code: int


@command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def retry(options: RetryOptions) -> int:
    """Runs COMMAND, and runs it again when a worker, a host or a disk was lost.

    For launchers that end all ranks when one dies: `stagerun retry -- mpirun -np 4 stagerun run DIR`, and the same with srun
    or torchrun. Launchers' exit codes say little, so it looks at what the run has left in its output folder. It ends when
    the run is done; when it was asked to stop, and has saved (75); with a mistake and what another start would not mend; and
    with 78 after three lives that got no further. A signal goes to COMMAND as SIGUSR1 (torchrun and others: SIGTERM), so
    that the run saves.
    """
    return retry_command(options)


def retry_command(options: RetryOptions) -> int:
    """The exit code. RecipeError, UsageError, StorageError, PermissionDenied, FolderInUseError, ResumeRefused."""
    task = _task(options)
    stop = Commanded()
    restarts, wait = 0, 1.0
    idle: list[bool] = []  # of the starts since it last got further: whether the run had begun
    while True:
        further, failed, ended = False, None, None
        try:
            before = _before(task)
            if before is None:
                tell("every stage is done")
                return ExitCode.DONE
            if stop.asked is not None:
                return ExitCode.SAVED
            ended = _one(options.command, task, stop)
            if stop.asked is not None:
                return _stopped(ended, task)
            code, why = judge(ended)
            if code is not None:
                return code
            further = _further(task, before)
        except StorageError as error:
            if stop.asked is not None or not (
                restarts or ended
            ):  # before the first start it is a mistake, as likely as not
                raise
            failed, why = error, str(error)
        idle = [] if further else [*idle, ended is not None and ended.began]
        if len(idle) >= LIMIT and not (task.retry and any(idle[-LIMIT:])):
            # Not 69, which a batch script would answer by starting the same again.
            came = "came to no snapshot and no result" if any(idle[-LIMIT:]) else "ended before the run had started"
            hint = "`stagerun run --retry` goes on all the same; or try the command by itself"
            raise failed or ResumeRefused(f"{LIMIT} starts in a row {came}: {why}", hint)
        if options.max_restarts is not None and restarts == options.max_restarts:
            tell(f"{why}; --max-restarts {restarts} is used up")
            return ExitCode.PEER
        wait = 1.0 if further else min(2 * wait, _LONGEST_WAIT_S)
        restarts += 1
        tell(f"restart {restarts} in {duration(wait)}: {why}")
        if stop.wait(wait):
            return ExitCode.SAVED  # what is left of the lives before is on disk


def judge(ended: Ended) -> tuple[int | None, str]:
    """The exit code to end with, None for another start; and why that one ended. Pure.

    A run that saved because it was asked to stop ends this, too, where the launcher says the same: whoever stops the ranks
    means it. A launcher that has lost a rank stops the others with the same signal, and ends with another code.
    """
    if not ended.began:
        if ended.code in (_NOT_EXECUTABLE, _NOT_FOUND):
            return ExitCode.RECIPE, ""
        if ended.code in _FINAL:
            return ended.code, ""
        return None, f"the command ended with {_code(ended.code)} before the run had started"
    if ended.life == ExitCode.DONE:
        return ExitCode.DONE, ""
    if ended.life == ExitCode.SAVED and ended.code == ExitCode.SAVED:
        return ExitCode.SAVED, ""
    if ended.life in _FINAL:
        return ended.life, ""
    if ended.life is None:
        return None, f"the run was killed (the command ended with {_code(ended.code)})"
    if ended.life == ExitCode.SAVED:
        return None, f"the run was stopped, and saved (the command ended with {_code(ended.code)})"
    meaning = next((code.meaning for code in ExitCode if code == ended.life), "unknown")
    return None, f"the run ended with {ended.life}: {meaning.partition(';')[0]}"


def _code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return next((number.name for number in signal.Signals if number == -code), f"signal {-code}")


# -- what the command runs


def _task(options: RetryOptions) -> RunOptions:
    """What COMMAND runs: the options of its `stagerun run`, and --out. UsageError."""
    words = words_of_run(options.command)
    if words is not None:
        try:
            with run.make_context("stagerun run", words, help_option_names=["-h", "--help"]) as context:
                found = filled(RunOptions, context.params)
        except click.exceptions.Exit as error:
            raise UsageError("COMMAND asks `stagerun run` for its help", "leave --help out") from error
        return replace(found, out=options.out or found.out)
    if options.schedule is None:
        raise UsageError(
            f"there is no `stagerun run DIR` in `{' '.join(options.command)}`",
            "say what it runs: `stagerun retry --schedule DIR [--out FOLDER] -- COMMAND...`",
        )
    return RunOptions(options.schedule, out=options.out)


def _before(task: RunOptions) -> str | None:
    """The `standing` before a start; None where nothing is left to do. Raises what the run would raise: it comes with its
    own exit code from here, which the launcher's may hide."""
    schedule, out = _place(task)
    schedule = looked_at(schedule, out)
    plan, found = whole_plan(schedule, out, task.selection)
    if results.nothing_to_do(plan, out):
        return None
    now = standing(DISK, out, schedule, found)
    if not task.retry:
        require_progress(DISK, out, now)
    return now


def _free(out: Path) -> None:
    """Waits until no lock holds the folder. FolderInUseError after a while."""
    end = time.monotonic() + _FOLDER_S
    while (holder := store.holder(out)) is not None:
        if time.monotonic() > end:
            raise FolderInUseError(
                f"{out} is still in use by {holder}, {duration(_FOLDER_S)} after the command had ended",
                "`stagerun status` shows what it does; end it, then run the same command again",
            )
        time.sleep(_LOOK_S)


def _further(task: RunOptions, before: str) -> bool:
    schedule, out = _place(task)
    return standing(DISK, out, schedule, store.inventory(DISK, out)) != before


def _place(task: RunOptions) -> tuple[Schedule, Path]:
    schedule = load(task.folder, task.overrides)
    return schedule, output_folder(schedule.name, task.out)


# -- one start


def _one(command: Sequence[str], task: RunOptions, stop: "Commanded") -> Ended:
    """One start, to its end, and what the run has left."""
    out = _place(task)[1]
    before = _newest(out)
    code = stop.run(command)
    with suppress(FolderInUseError):  # reported before the next start
        _free(out)
    after = _newest(out)
    began = after is not None and (before is None or after.attempt > before.attempt)
    return Ended(began, after.code if after is not None else None, code)


def _newest(out: Path) -> store.Life | None:
    return next(iter(store.last_lives(DISK, out, 1)), None)


def _stopped(ended: Ended, task: RunOptions) -> int:
    """The exit code where this process was asked to stop. FolderInUseError where the run goes on without the command."""
    out = _place(task)[1]
    if (holder := store.holder(out)) is not None:
        raise FolderInUseError(
            f"the command has ended, but {out} is still in use by {holder}",
            "`stagerun status` shows what it does; a signal to that process has it saved",
        )
    if ended.began and ended.life in (ExitCode.DONE, *_FINAL):
        assert ended.life is not None
        return ended.life
    if ended.began and ended.life != ExitCode.SAVED and ended.code != 0:
        tell("the command ended without saving; run the same again: it goes on from the newest snapshot")
        return ExitCode.PEER
    return ExitCode.SAVED


# -- the command, and the signals that go on to it

# From a second Ctrl-C to SIGKILL.
_HURRY_S = 5.0


class Commanded:
    """The command under way, and the signals that this process gets. Handlers, and no blocked signals: what is started
    would inherit these."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._interrupts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_to_end: set[psutil.Process] = set()
        for number in signals.stop_signals():
            signal.signal(number, self._handle)

    def run(self, command: Sequence[str]) -> int:
        """Runs it in a session of its own; returns its exit code. A Ctrl-C at the terminal would else reach the launcher too, which may
        kill its ranks for it."""
        try:
            with signals.held():  # one that comes now finds the process
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_begin
                )
        except OSError as error:
            raise UsageError(f"`{command[0]}` can't be started: {error.strerror}") from error
        if self.asked is not None:
            self._pass_on()
        while (code := self._process.poll()) is None:
            time.sleep(_LOOK_S)
            if self._asked_to_end and not any(map(lives, self._asked_to_end)):
                _ask_to_end(self._process.pid, self._asked_to_end)  # the script may go on to its next command
        self._process = None
        return code

    def wait(self, seconds: float) -> bool:
        """Waits; returns whether there was a signal meanwhile."""
        end = time.monotonic() + seconds
        while self.asked is None and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return self.asked is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self.asked is None:
            self.asked = signal.Signals(number)
            self._pass_on()
        elif number == signal.SIGINT and self._interrupts > 1:
            self._hurry()

    def _pass_on(self) -> None:
        if self._process is not None:
            signals.say(f"{(self.asked or signal.SIGTERM).name}: the command is asked to stop")
            if not _ask_to_end(self._process.pid, self._asked_to_end):
                with suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGTERM)

    def _hurry(self) -> None:
        if self._process is not None:
            pid = self._process.pid
            with suppress(OSError):
                os.killpg(pid, signal.SIGTERM)
            end = time.monotonic() + _HURRY_S
            while time.monotonic() < end and living(pid) is not None:
                time.sleep(_LOOK_S)
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
        signals.end_at_once(ExitCode.INTERRUPTED, "ended without saving")


def _begin() -> None:
    """In the command's process: it is asked to end when this one is killed."""
    signals.release()
    die_with_parent(signal.SIGTERM)


def _ask_to_end(pid: int, asked: set[psutil.Process]) -> bool:
    """Asks what the process has become to save and end, each launcher or run once. Returns whether there is one."""
    found = to_be_told(pid)
    if found is not None and found[0] not in asked:
        asked.add(found[0])
        with suppress(OSError):
            os.kill(found[0].pid, found[1])
    return found is not None


def to_be_told(pid: int) -> tuple[psutil.Process, signal.Signals] | None:
    """What to send a signal to, `pid` or the nearest one below it, so that all ranks save, and by which signal: an MPI's launcher or srun, or
    else whatever has `stagerun run` among its words, as torchrun has. None if there is neither: a script that comes to it later.
    """
    runs: list[psutil.Process] = []
    for kin in _family(pid):
        with suppress(psutil.Error):  # this one is over; the others are not
            if _is_shell(kin.pid):
                continue
            if kin.name().startswith(_TAKES_USR1):
                return kin, signal.SIGUSR1
            if words_of_run(kin.cmdline()) is not None:
                runs.append(kin)
    return (runs[0], signal.SIGTERM) if runs else None


def words_of_run(command: Sequence[str]) -> list[str] | None:
    """The words after `stagerun run` or `python -m stagerun run`; None without these."""
    for at in range(len(command) - 1):
        if os.path.basename(command[at]) == "stagerun" and command[at + 1] == "run":
            return list(command[at + 2 :])
    return None


def _family(pid: int) -> list[psutil.Process]:
    """The process and those below it, the nearest first, the oldest of several first."""
    found = [first] if (first := living(pid)) is not None else []
    for process in found:  # which grows meanwhile
        with suppress(psutil.Error):
            found += sorted(filter(lives, process.children()), key=psutil.Process.create_time)
    return found


def _is_shell(pid: int) -> bool:
    """By what runs: a script has its own name, and may have that of a launcher."""
    try:
        program = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return False
    return program.rstrip("-.0123456789") in _SHELLS
