"""`run --notify COMMAND`, in the process that the user called: it starts the notifier, and says how the run ended."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType

from stagerun.base.errors import ExitCode, StagerunError, UsageError
from stagerun.command.ending import of_surroundings, tell
from stagerun.language import load
from stagerun.launch import StopRequest
from stagerun.launch.start import Job
from stagerun.launch.watch.worker import Monitored
from stagerun.system import signals
from stagerun.system.process import program
from stagerun.system.world import World, rank_said
from stagerun.train.notifier import TIMEOUT_S, Orders
from stagerun.train.options import RunOptions


def check_commands(commands: Sequence[str]) -> None:
    """UsageError for one that can't be a command."""
    for command in commands:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"--notify {command!r}: {error}", "it is split into words as a shell does it") from error
        if not words or shutil.which(words[0]) is None:
            hint = "no shell reads it: where you need one, write --notify \"sh -c '...'\""
            raise UsageError(f"--notify {command!r}: there is no such program", hint)


class Notified:
    """While it is entered, the notifier lives. It is told once how the run ends: by `ended`, or at the end of the `with`."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Notified":
        if self._options.notify and rank_said() == 0 and self._process is None:  # `around` enters it once more
            try:
                self._start()
            except OSError as error:
                tell(f"warning: --notify: no process can be started for it: {error.strerror}")
        return self

    def _start(self) -> None:
        options, schedule, out, size = self._options, None, None, 0
        with suppress(StagerunError):  # which the run reports
            found = load(options.folder, options.overrides)
            schedule, out = found.name, options.output(found).absolute()
            with suppress(OSError):
                size = (out / "log.jsonl").stat().st_size
        orders = Orders(commands=options.notify, schedule=schedule, out=None if out is None else str(out), size=size)
        self._process = subprocess.Popen(
            [sys.executable, *program("stagerun.train.notifier")], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
        self._process.stdin.flush()
        signals.last_words.append(self._last_words)

    def _last_words(self, code: int, text: str) -> None:
        """From a handler, so that no buffer is touched. The notifier needs no one who waits for it."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                os.write(process.stdin.fileno(), _end(code, text))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit):
            self.ended(error.code if isinstance(error.code, int) else int(ExitCode.BUG))
        elif isinstance(error, KeyboardInterrupt):
            self.ended(int(ExitCode.INTERRUPTED))
        elif error is not None:
            known = error if isinstance(error, StagerunError) else of_surroundings(error)
            self.ended(
                int(known.exit_code) if known else int(ExitCode.BUG),
                known.render() if known else f"{type(error).__name__}: {error}",
            )

    def ended(self, code: int, text: str = "") -> int:
        """Waits until the commands have run."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.write(_end(code, text))
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(2 * TIMEOUT_S + 5)  # a stage may just have ended, too
        return code

    def around(self, job: Job) -> Job:
        """The job of a worker that another launcher has started: it ends in ways that come back to no one."""

        def noticed(world: World, stop: StopRequest, watch: Monitored | None) -> int:
            with self:
                return self.ended(job(world, stop, watch))

        return noticed


def _end(code: int, text: str) -> bytes:
    return json.dumps({"code": int(code), "text": text}).encode() + b"\n"
