"""Threads of a real process, moved to where a plan says; seen in /proc. No torch."""

import os
import subprocess
import sys
import textwrap

import pytest

HEAD = """
    import os, socket, subprocess, sys, threading
    from stagerun.system import binding
    from stagerun.launch.placing import Seat
    first, second = sorted(os.sched_getaffinity(0))[:2]

    def cpus(tid):
        return sorted(os.sched_getaffinity(tid))

    def seat(memory=None):
        return Seat(0, (0,), 2, 1, frozenset({first}), frozenset({second}), memory)
"""

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU is allowed: nothing can be told apart")


def python(text: str, *arguments: str) -> str:
    code = textwrap.dedent(HEAD) + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_two
def test_who_runs_where() -> None:
    """The main thread and what it starts compute; threads that were there, and those that step aside, do not."""
    python("""
    gate = threading.Event()
    before = threading.Thread(target=gate.wait)
    before.start()
    helper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = {}
    binding.step_aside()
    assert cpus(0) == [*{first, second}] or len(cpus(0)) > 2, "no one is bound yet: nothing happens"
    binding.bind(seat())
    binding.bind_process(helper.pid)

    def run(name, *words):
        if name:
            binding.step_aside(*words)
        seen[name] = cpus(0)

    for words in (("",), ("one",), ("five", 5)):
        thread = threading.Thread(target=run, args=words)
        thread.start()
        thread.join()
    assert cpus(0) == [first], "computes"
    assert cpus(before.native_id) == [second]
    assert seen == {"": [first], "one": [second], "five": [first, second]}, seen
    assert cpus(helper.pid) == [second]
    helper.communicate(b"")
    gate.set()
    """)


@needs_two
def test_threads_of_a_group_are_known_by_their_names() -> None:
    """A fresh one has the name of the thread that started it, for a moment."""
    python("""
    import ctypes, time
    libc = ctypes.CDLL(None)
    gate = threading.Event()

    def native(name, delay):  # as C++ starts it: after the main thread was bound, unknown to Python's list of threads to be moved
        time.sleep(delay)
        libc.prctl(15, name.encode(), 0, 0, 0)
        gate.wait()

    binding._NAMES_S = 30.0  # a busy machine starts threads late
    binding.bind(seat())
    group = [("pt_tcpstore_uv", 0.1), ("else", 0.1), ("gloo_tcp_loop", 0.1), ("pt_gloo_runloop", 0.1), ("pt_gloo_runloop", 0.4)]
    threads = [threading.Thread(target=native, args=words) for words in group]
    for thread in threads:
        thread.start()
    assert all(cpus(thread.native_id) == [first] for thread in threads)
    binding.bind_communication()
    assert [cpus(thread.native_id) for thread in threads] == [[second], [first], [second], [second], [second]]
    gate.set()
    """)


@needs_two
def test_memory_comes_from_the_node() -> None:
    """The kernel shows a preference in numa_maps; one that the user has set stays."""
    python("""
    policies = lambda: {line.split()[1] for line in open("/proc/self/numa_maps")}
    if not os.path.exists("/proc/self/numa_maps"):
        sys.exit()
    assert policies() == {"default"}
    binding.bind(seat(memory=0))
    assert policies() == {"prefer:0"}, policies()
    """)
    python("""
    import ctypes
    if not os.path.exists("/proc/self/numa_maps") or os.uname().machine != "x86_64":
        sys.exit()
    assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(ctypes.c_ulong(1)), ctypes.c_ulong(64)) == 0  # MPOL_BIND
    binding.bind(seat(memory=0))
    assert {line.split()[1] for line in open("/proc/self/numa_maps")} == {"bind:0"}
    """)


@needs_two
def test_two_jobs_on_the_same_cores() -> None:
    """The second is told, until the first has ended."""
    python("""
    binding._NAME = "\\0test-" + str(os.getpid()) + "-"
    other = "from stagerun.system import binding; from stagerun.launch.placing import Seat; import sys;"
    other += "binding._NAME, binding._CLAIM_S = '\\\\0' + sys.argv[1], 0.0; first, second = map(int, sys.argv[2:]);"
    other += "print(binding.claim(Seat(0, (0,), 1, 0, frozenset({first}), frozenset({second}))))"

    def claimed(*seat):
        words = [binding._NAME[1:], *map(str, seat)]
        return subprocess.run([sys.executable, "-c", other, *words], capture_output=True, text=True).stdout.strip()

    assert claimed(first, second) == "True"
    assert binding.claim(seat())
    assert claimed(first, first) == claimed(second, second) == claimed(7001, second) == "False"
    assert claimed(7001, 7002) == "True"
    assert claimed(7001, 7002) == "True", "the one before has ended"
    """)


@needs_two
def test_a_cpu_that_is_not_ours() -> None:
    with pytest.raises(AssertionError, match="Invalid argument"):
        python("binding.bind(Seat(0, (0,), 1, 0, frozenset({1023}), frozenset({1023})))")
