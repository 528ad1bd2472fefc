"""The process from its first instruction: a stop signal during imports is handled, too."""

import os
import sys
from contextlib import suppress

from stagerun.system import signals

# errors.ExitCode, which is not imported yet.
_SAVED, _INTERRUPTED = 75, 130
# As in stagerun.system.world, which is not imported yet.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def _open_streams() -> None:
    """Open stdin, stdout and stderr if they were closed before the start: else the next opened files get their numbers, and child processes
    write into these."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            with suppress(OSError):  # no /dev/null
                os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
                setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def main() -> None:
    _open_streams()
    runs = sys.argv[1:2] in (["run"], ["retry"])
    # The launcher prints for several workers, or else rank 0.
    silent = "STAGERUN_REPORT_DIR" in os.environ or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    text = "nothing was started; run the same command again" if runs else "interrupted"
    signals.leave(_SAVED if runs else _INTERRUPTED, "" if silent else text)
    signals.release()  # the launcher starts workers with these signals blocked
    from stagerun.cli import main as command

    code: object = 1  # Python's code for an exception
    try:
        if not runs:
            signals.interrupt()
        command()
        code = 0
    except SystemExit as ended:
        code = ended.code
        raise
    except KeyboardInterrupt:  # before a command has started, or after it
        signals.end_at_once(_INTERRUPTED, "" if silent else "interrupted")
    finally:
        signals.settle()  # during teardown the exit code is fixed
        if (users := sys.modules.get("stagerun.system.code")) is not None and isinstance(code, int):
            users.end_soon(code)


if __name__ == "__main__":
    main()
