"""The process, from its first instruction on: a stop signal that comes while modules are imported is answered, too."""

import os
import sys
from contextlib import suppress

from stagerun.system import signals

# errors.ExitCode, which is not imported yet.
_SAVED, _INTERRUPTED = 75, 130
# What stagerun.system.world reads, which is not imported yet either.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def _open_streams() -> None:
    """Opens those of stdin, stdout and stderr that were closed before the start: else the next files that are opened get their numbers, and
    a program that is started from here finds its own output in their place."""
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
    # Of several workers our launcher speaks, or else rank 0.
    silent = "STAGERUN_REPORT_DIR" in os.environ or any(os.environ.get(name, "0") != "0" for name in _RANKS)
    text = "nothing was started; run the same command again" if runs else "interrupted"
    signals.leave(_SAVED if runs else _INTERRUPTED, "" if silent else text)
    signals.release()  # our launcher starts its workers with these signals blocked
    from stagerun.cli import main as command

    code: object = 1  # Python's own, of an exception that is shown by it
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
        signals.settle()  # while the interpreter is taken down: the exit code is settled, too
        if (users := sys.modules.get("stagerun.system.code")) is not None and isinstance(code, int):
            users.end_soon(code)


if __name__ == "__main__":
    main()
