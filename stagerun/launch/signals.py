"""Which signals ask a run to save and stop."""

import signal

_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, SIGHUP and SIGUSR1, without those that this process was started to ignore (nohup and SIGHUP)."""
    return [s for s in _STOP if signal.getsignal(s) is not signal.SIG_IGN]
