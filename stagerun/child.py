"""Processes that start processes of their own: what they are started with, and that these don't outlive them."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# As `python -m`, but without the current folder in sys.path, which it would put first there.
_RUN = "import runpy, sys; del sys.path[:sys.path[:1] == ['']]; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"


def program(module: str, any_version: bool = False) -> list[str]:
    """What this interpreter is to be started with to run a module of this package as a program; with `any_version` another host's.

    The current folder is where the user's own files are, and one named `selectors.py` is no module of ours. It is searched only where it is
    for this very process, started by `python -m` (or `-c`) in it: there the package itself may be found in no other place.
    """
    by_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    # A process that _RUN or -P has started is one by module, too, and its path begins elsewhere.
    if "" in sys.path or (by_module and sys.path[:1] == [os.getcwd()]):
        return ["-m", module]
    if sys.version_info >= (3, 11) and not any_version:
        return ["-P", "-m", module]
    return ["-c", _RUN.format(module=module)]


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Has the kernel send this process the signal when the thread that started it ends. OSError."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
