"""`--hosts`: start one command a host over ssh (`launch.on_host`), tell each its ranks and where all meet, and end them together. The
launcher itself trains nothing and needs no torch."""

import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import IO, Any

import msgspec

from stagerun.base.errors import AGAIN, ExitCode, PeerError, UsageError
from stagerun.base.recipe import Schedule
from stagerun.command.ending import tell, to_nowhere
from stagerun.launch.local import Node, Orders, Outcome, verdict
from stagerun.launch.on_host import MARK, Hello
from stagerun.launch.options import Host, HostOptions, read_hosts
from stagerun.plan.choice import check_workers, most_workers
from stagerun.system import signals
from stagerun.system.host import host_name
from stagerun.system.process import program
from stagerun.system.typed import json_line

# These come first on ssh's command line, where only `--ssh "ssh -o ..."` overrides them. A shared connection may outlive its host's
# restart, or fail with another command's.
_OPTIONS = (
    *("-oBatchMode=yes", "-oConnectTimeout=10", "-oServerAliveInterval=5", "-oServerAliveCountMax=3"),
    *("-oControlMaster=no", "-oControlPath=none", "-oClearAllForwardings=yes"),
)
_RSYNC = ("rsync", "-aL", "--chmod=go-w", "--timeout=600", "--exclude=.*", "--exclude=__pycache__")
# Exit codes of the shell that starts `on_host`, where it can't.
_NO_FOLDER, _NO_PYTHON = 200, 201
_SSH_FAILED = 255
# Prefixes and names of the variables that change what a worker does; none holds a secret.
_PASSED = ("OMP_", "MKL_", "ONEDNN_", "DNNL_", "STAGERUN_", "NCCL_", "GLOO_", "TORCH_")
_PASSED_WHOLE = ("CUDA_VISIBLE_DEVICES", "KMP_AFFINITY", "KMP_BLOCKTIME")
_NOT_PASSED = ("STAGERUN_REPORT_DIR", "STAGERUN_LAUNCHER_PID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True, slots=True)
class Access:
    """Commands that reach hosts. `folder`: the current folder of the command on each host; `~/` is that user's home. `copied`: the
    schedule's folder, copied into it first; '' without `--sync`."""

    ssh: tuple[str, ...]
    folder: str
    copied: str = ""

    @staticmethod
    def of(options: HostOptions, folder: str) -> "Access":
        """Read the options; `folder`: the schedule's, on this host. UsageError."""
        try:
            words = tuple(shlex.split("ssh" if options.ssh is None else options.ssh))
        except ValueError as error:
            raise UsageError(f"--ssh {options.ssh}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UsageError(f"command `{' '.join(words)}` is not installed here", 'as in --ssh "ssh -F my_config"')
        if options.sync is None:
            # PWD is the user's name for the folder, which an automounter may serve on all hosts.
            named = os.environ.get("PWD", "")
            return Access(words, named if os.path.isdir(named) and os.path.samefile(named, ".") else os.getcwd())
        if shutil.which("rsync") is None:
            raise UsageError("--sync needs rsync", "install it here and on the hosts")
        copied = os.path.abspath(folder)
        target = options.sync or f"~/stagerun/{os.path.basename(copied)}"
        if not target.startswith(("/", "~/")):
            raise UsageError(
                f"--sync {target} is not an absolute path", "hosts have no current folder: begin with `/`, or with `~/`"
            )
        return Access(words, target, copied)

    def command(self, host: Host) -> list[str]:
        """Return the command that starts `launch.on_host`: by ssh, except on this host."""
        python, module = shlex.quote(sys.executable), shlex.join(program("stagerun.launch.on_host", any_version=True))
        enter = f"cd {_quoted(self.folder)} 2>/dev/null || exit {_NO_FOLDER}"
        script = f"command -v {python} >/dev/null || exit {_NO_PYTHON}; {enter}; exec {python} {module}"
        if _is_here(host):
            return ["/bin/sh", "-c", script]
        name = host.name.replace("[", "").replace("]", "")
        return [*self.ssh, "-T", *_OPTIONS, name, f"exec /bin/sh -c {shlex.quote(script)}"]

    def copy(self, host: Host) -> list[str]:
        """Return the call of rsync that copies the schedule into a folder of this user."""
        folder = _quoted(self.folder)
        make = f"mkdir -p {folder} && test -O {folder} && rsync"
        if _is_here(host):
            return ["/bin/sh", "-c", f"{make} {shlex.join([*_RSYNC[1:], self.copied])} {folder}/"]
        target = self.folder.removeprefix("~/")  # rsync starts in the home folder
        remote = shlex.join([*self.ssh, *_OPTIONS])
        return [*_RSYNC, "-e", remote, f"--rsync-path={make}", self.copied, f"{host.name}:{target}/"]

    def why(self, host: Host, code: int | None, last: str) -> str:
        """Explain, with a hint, why a host did not start. `code`: the exit code of its command; None while it runs. `last`: its last line."""
        ssh = shlex.join([*self.ssh, host.name])
        text, hint = f"can't start: its command ended with exit code {code}: {last or 'without a message'}", ""
        if code is None:
            text, hint = "does not answer", f"`{ssh} true` must come back, without a question"
        elif code == _NO_FOLDER:
            text, hint = f"has no folder {self.folder}", "mount it, or let `--sync` copy the schedule"
        elif code == _NO_PYTHON:
            text, hint = f"has no {sys.executable}", "install it at the same path"
        elif "No module named" in last and "stagerun" in last:
            text, hint = f"has no stagerun in {sys.executable}", "install it"
        elif code == _SSH_FAILED and not _is_here(host):
            text = f"can't be reached: {last or 'ssh gives no reason'}"
            hint = f"`{ssh} true` must work without a password or a question; a list of one name is a host, not a file"
        return f"{host.name} {text}" + (f"\n  hint: {hint}" if hint else "")


def _quoted(folder: str) -> str:
    """Quote a folder for a shell, which replaces `~/`."""
    home, rest = folder.startswith("~/"), folder.removeprefix("~/")
    return f'"$HOME"/{shlex.quote(rest)}' if home else shlex.quote(folder)


def _is_here(host: Host) -> bool:
    """Return whether the name is this host's, which needs no ssh."""
    name = host_name()
    return host.name in ("localhost", name, name.partition(".")[0])


# Timeout of a host's greeting: its interpreter may come from a busy file server.
_HELLO_S = 90.0
# Added to --grace after a stop signal or another host's failure.
_MARGIN_S, _END_S = 60.0, 2.0
_LONGEST_LINE = 1 << 16


class _Connection:
    """The command on one host. Two threads put its lines into `lines`, with their stream (out, err); an empty line ends a stream."""

    def __init__(self, host: Host, access: Access, lines: "queue.Queue[tuple[_Connection, str, str]]") -> None:
        self.host, self.name = host, host.name
        self.hello: Hello | None = None
        self.end: Outcome | None = None
        self.lost = ""  # why, with a hint
        self.last_line = ""  # last line before its hello: ssh's, or a shell's
        self.ranks = range(0)
        self.open = 2  # streams
        self.process = subprocess.Popen(
            access.command(host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher
        )  # fmt: skip
        for kind, stream in (("out", self.process.stdout), ("err", self.process.stderr)):
            threading.Thread(target=self._read, args=(kind, stream, lines), daemon=True).start()

    def _read(self, kind: str, stream: IO[bytes], lines: "queue.Queue[tuple[_Connection, str, str]]") -> None:
        while data := stream.readline(_LONGEST_LINE):
            lines.put((self, kind, data.decode(errors="replace")))
        lines.put((self, kind, ""))

    def send(self, **words: Any) -> None:
        """Send a message in one short write, which a signal handler may make."""
        with suppress(OSError):  # a lost host shows at its streams
            os.write(self.process.stdin.fileno(), json_line(words))  # type: ignore[union-attr]

    @property
    def over(self) -> bool:
        return self.end is not None or bool(self.lost)


def on_hosts(orders: Orders, folder: str, schedule: Schedule, options: HostOptions, nproc: int | None) -> int:
    """Run `orders` on all hosts; return the exit code. `schedule`: as read here, in `folder`. `nproc`: workers per host; None: the
    host file's number, or that host's default. StagerunError if the run can't begin."""
    assert options.hosts is not None
    hosts, access = read_hosts(options.hosts), Access.of(options, folder)
    if access.copied:
        _copy(hosts, access)
    launch = _Launch(orders, hosts, access)
    try:
        code, text = launch.run(launch.meet(schedule, nproc))
    finally:
        launch.close()
    tell(text)
    return code


def _copy(hosts: Sequence[Host], access: Access) -> None:
    """Copy the schedule to all hosts. PeerError with every host where that fails."""
    with signals.held():
        started = [(host, subprocess.Popen(access.copy(host), stderr=subprocess.PIPE)) for host in hosts]
    failures = []
    for host, process in started:
        output = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode != 0:
            failures.append(f"{host.name}: the schedule can't be copied: {output or 'rsync failed'}")
    if failures:
        raise PeerError("\n".join(failures), "install rsync on all hosts; the target folder must belong to you")


class _Launch:
    def __init__(self, orders: Orders, hosts: Sequence[Host], access: Access) -> None:
        self.orders, self.access = orders, access
        self.lines: queue.Queue[tuple[_Connection, str, str]] = queue.Queue()
        self.stops: list[int] = []  # stop signals
        with signals.held():
            self.all = [_Connection(host, access, self.lines) for host in hosts]

    def meet(self, schedule: Schedule, nproc: int | None) -> str:
        """Give each host its ranks. Return the ADDRESS:PORT where they meet: the first host's address on its route to the second, and a
        free port. PeerError with every missing host; RecipeError."""
        first, *others = self.all
        names = [name for name in os.environ if name.startswith(_PASSED) or name in _PASSED_WHOLE]
        environment = {name: os.environ[name] for name in names if name not in _NOT_PASSED}
        peer = (others[0] if others else first).host.address
        for one in self.all:
            one.send(environment=environment, most=most_workers(schedule), peer=peer)
        last = time.monotonic() + _HELLO_S
        while waiting := [one for one in self.all if one.hello is None and not one.lost]:
            if time.monotonic() > last:
                for one in waiting:
                    one.lost = self.access.why(one.host, None, one.last_line)
            self._take()
        if lost := [one.lost for one in self.all if one.lost]:
            raise PeerError("\n".join(lost))
        hellos = [one.hello for one in self.all if one.hello is not None]
        size = 0
        for one, hello in zip(self.all, hellos, strict=True):
            one.ranks = range(size, size + (nproc or one.host.slots or hello.workers))
            size = one.ranks.stop
        check_workers(schedule, size)
        address = hellos[0].address if others else "127.0.0.1"
        if not address:
            hint = "name the hosts by names or addresses that all of them resolve"
            raise PeerError(f"{first.name} finds no address at which the other hosts reach it", hint)
        return f"{address}:{hellos[0].port}"

    def run(self, endpoint: str) -> tuple[int, str]:
        """Run the workers to their end; return the exit code and the message."""
        for number in signals.stop_signals():
            signal.signal(number, self._stop)
        for one in self.all:
            node = Node(one.ranks.start, len(one.ranks), self.all[-1].ranks.stop, endpoint)
            one.send(orders=replace(self.orders, limits=None), node=node)
        deadline = float("inf")
        while left := [one for one in self.all if not one.over]:
            self._take()
            if self.stops or any(one.lost or (one.end is not None and one.end.failed) for one in self.all):
                deadline = min(deadline, time.monotonic() + self.orders.grace + _MARGIN_S)
            if time.monotonic() > deadline:
                for one in left:
                    one.send(end=True)
                    one.lost = f"{one.name}: its workers did not end in time and were killed\n  hint: {AGAIN}"
        return self._verdict()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """Forward the first stop signal, so that all save; a second SIGINT ends all at once."""
        self.stops.append(number)
        for one in self.all:
            if self.stops.count(signal.SIGINT) > 1:
                one.send(end=True)
            elif len(self.stops) == 1:
                one.send(stop=number)

    def _verdict(self) -> tuple[int, str]:
        ends = [one.end for one in self.all if one.end is not None]
        reports = sorted((report for end in ends for report in end.reports), key=lambda report: report.rank)
        deaths = {rank: code for end in ends for rank, code in end.deaths.items()}
        lost = [one.lost for one in self.all if one.lost]
        interrupted = self.stops.count(signal.SIGINT) > 1
        if (
            lost
            and not interrupted
            and not any(report.code not in (ExitCode.DONE, ExitCode.SAVED, ExitCode.PEER) for report in reports)
        ):
            return ExitCode.PEER, "\n".join(lost)
        stops = self.stops[0] if self.stops else None
        outcome = Outcome(reports, deaths, stops, any(end.late for end in ends), interrupted)
        return verdict(outcome, self.orders, {rank: one.name for one in self.all for rank in one.ranks})

    def _take(self) -> None:
        """Handle a host's next line."""
        with suppress(queue.Empty):
            one, kind, line = self.lines.get(timeout=0.25)
            if line:
                self._heard(one, kind, line)
            else:
                one.open -= 1
                if not one.open and not one.over:
                    self._lose(one)

    def _heard(self, one: _Connection, kind: str, line: str) -> None:
        before, mark, message = line.partition(MARK) if kind == "out" else (line, "", "")
        if one.hello is None:
            one.last_line = before.strip() or one.last_line
        elif before:  # a worker's line; all but the first host's begin with the host's name
            stream = sys.stdout if kind == "out" else sys.stderr
            try:
                stream.write(before if one is self.all[0] else f"{one.name}: {before}")
                stream.flush()
            except OSError:  # the reader has gone; the run continues
                to_nowhere(stream)
        if mark:
            with suppress(ValueError):  # cut off: the end of the stream follows
                if one.hello is None:
                    one.hello = msgspec.convert(json.loads(message), Hello)
                else:
                    one.end = msgspec.convert(json.loads(message), Outcome, str_keys=True)

    def _lose(self, one: _Connection) -> None:
        """Handle a connection that ended before its workers: stop the other hosts' workers."""
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(1.0)
        if not one.ranks:
            one.lost = self.access.why(one.host, one.process.poll(), one.last_line)
            return
        ranks = " ".join(map(str, one.ranks))
        text = f"{one.name} is gone: its connection ended (rank{'s' if len(one.ranks) > 1 else ''} {ranks})"
        one.lost = f"{text}\n  hint: {AGAIN}"
        tell(text)
        for other in self.all:  # monitors end workers that hang in a collective
            other.send(stop=signal.SIGTERM)

    def close(self) -> None:
        """End the remaining commands."""
        last = time.monotonic() + _END_S
        for one in self.all:
            with suppress(OSError):
                one.process.stdin.close()  # type: ignore[union-attr]
        for one in self.all:
            try:
                one.process.wait(max(0.0, last - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
