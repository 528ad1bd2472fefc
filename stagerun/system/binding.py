"""Has the threads of this process run where they are to: the effects of a `topology.Seat`.

A thread inherits the CPUs and the memory policy of the one that starts it. So the main thread is put on the CPUs that compute, and
with it the team of threads that computes with it, which begins later; whatever else is started steps aside by itself. OMP_PROC_BIND
and its like are not used: they would put the main thread on one CPU, and every thread that it starts after that with it.
"""

import ctypes
import errno
import os
import platform
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stagerun.launch.placing import Seat

# Threads of torch.distributed, by the kernel's names, of which it keeps 15 letters. A fresh one may still have its starter's name.
_COMMUNICATES = ("gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "pt_nccl_", "pt_elastic")
# Of each group of gloo.
_GLOO = {"gloo_tcp_loop": 1, "pt_gloo_runloop": 2}
_NAMES_S, _LOOK_S = 1.0, 0.01
# After the end of another job its last processes may still be about to go.
_CLAIM_S = 1.0
_NAME = "\0stagerun-cpu-"

# linux/mempolicy.h, and the numbers of set_mempolicy and get_mempolicy.
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_SET_GET = {"x86_64": (238, 239), "aarch64": (237, 236), "ppc64le": (261, 260), "riscv64": (237, 236)}
_MOST_NODES = 1024

# Of this process, as its affinity is. `_apart`: where whatever doesn't compute belongs; empty: nothing is bound. `_slice`: all its CPUs.
# `_held` shows others that they are taken.
_apart: frozenset[int] = frozenset()
_slice: frozenset[int] = frozenset()
_held: list[socket.socket] = []


def bind(seat: "Seat") -> None:
    """Moves this process to its seat: call in the main thread, before it has computed. OSError where the kernel refuses."""
    global _apart, _slice
    os.sched_setaffinity(0, seat.compute)
    if seat.memory is not None:
        _prefer(seat.memory)
    _apart, _slice = seat.apart, seat.apart | seat.compute
    main = threading.main_thread()
    for thread in threading.enumerate():
        if thread is not main and thread.native_id is not None:
            _move(thread.native_id, seat.apart)


def step_aside(threads: int = 1) -> None:
    """What a thread that doesn't compute does first; `threads` of its like want to run at the same time, and where there are not as
    many CPUs set apart they have the whole slice: to wait for images is worse than to be disturbed. Nothing where no CPUs are bound."""
    if _apart:
        _move(0, _apart if threads <= len(_apart) else _slice)


def bind_communication(groups: int = 1) -> None:
    """Moves the threads of torch.distributed aside: after each new process group, whose threads were started by the main one.
    `groups`: so many of gloo there are, and their threads are waited for until they have their names."""
    if not _apart:
        return
    end = time.monotonic() + _NAMES_S
    while time.monotonic() < end:
        found = list(names().values())
        if all(found.count(word) >= number * groups for word, number in _GLOO.items()):
            break
        time.sleep(_LOOK_S)
    for tid, name in names().items():
        if name.startswith(tuple(word[:15] for word in _COMMUNICATES)):
            _move(tid, _apart)


def bind_process(pid: int) -> None:
    """A helper of this process that doesn't compute, with one thread yet or with several."""
    if _apart:
        for tid in names(pid):
            _move(tid, _apart)


def names(pid: int | None = None) -> dict[int, str]:
    """The threads of a process, by default of this one, and what the kernel calls them."""
    found = {}
    with suppress(OSError):
        for tid in os.listdir(f"/proc/{pid or 'self'}/task"):
            with suppress(OSError), open(f"/proc/{pid or 'self'}/task/{tid}/comm") as file:
                found[int(tid)] = file.read().strip()
    return found


def _move(tid: int, cpus: Iterable[int]) -> None:
    with suppress(OSError):  # it has ended, or a cpuset became smaller: it runs on all the same
        os.sched_setaffinity(tid, cpus)


def claim(seat: "Seat") -> bool:
    """Shows other jobs of stagerun on this machine, whoever's, that these CPUs are taken, until this process ends. False where
    another has said so. (By names without a file: containers with a network of their own don't see each other's.)"""
    end = time.monotonic() + _CLAIM_S
    while True:
        held: list[socket.socket] = []
        try:
            for cpu in sorted(seat.compute | seat.apart):
                held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                held[-1].bind(f"{_NAME}{cpu}")
            _held.extend(held)
            return True
        except OSError as error:
            for one in held:
                one.close()
            if error.errno != errno.EADDRINUSE:
                return True  # too many files, say: no one can be informed, and no one has said anything
            if time.monotonic() > end:
                return False
            time.sleep(5 * _LOOK_S)


def _prefer(node: int) -> None:
    """Memory of this thread and of those that it starts comes from `node` while there is some.

    MPOL_PREFERRED, not MPOL_BIND: with that a run ends by the kernel's hand when its node is full, though another has room. What
    the user has set for the process (`numactl --membind`) is left as it is. Where the system has no such call nothing is lost: a
    thread's memory is as a rule from the node where it runs.
    """
    calls = _SET_GET.get(platform.machine())
    if calls is None or node >= _MOST_NODES:
        return
    library = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_int(-1)
    none = ctypes.c_void_p()
    if library.syscall(calls[1], ctypes.byref(mode), none, ctypes.c_ulong(0), none, ctypes.c_ulong(0)):
        return
    if mode.value != _MPOL_DEFAULT:
        return
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node // bits] = 1 << (node % bits)
    library.syscall(calls[0], ctypes.c_int(_MPOL_PREFERRED), mask, ctypes.c_ulong(_MOST_NODES))
