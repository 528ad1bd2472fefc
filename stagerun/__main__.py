"""The process, from its first instruction on: a stop signal that comes while modules are imported is answered, too."""

import os
import sys

from stagerun import signals

# errors.ExitCode, which is not imported yet.
_SAVED, _INTERRUPTED = 75, 130


def main() -> None:
    runs = sys.argv[1:2] == ["run"]
    # Of several workers our launcher speaks, or else rank 0.
    silent = "STAGERUN_REPORT_DIR" in os.environ or os.environ.get("RANK", "0") != "0"
    text = "nothing was begun; run the same command again" if runs else "interrupted"
    signals.leave(_SAVED if runs else _INTERRUPTED, "" if silent else text)
    signals.release()  # our launcher starts its workers with these signals blocked
    from stagerun.cli.main import main as command

    try:
        if not runs:
            signals.interrupt()
        command()
    except KeyboardInterrupt:  # before a command has begun, or after it
        signals.end_at_once(_INTERRUPTED, "" if silent else "interrupted")
    finally:
        signals.settle()  # while the interpreter is taken down: the exit code is settled, too


if __name__ == "__main__":
    main()
