"""`--hosts`: a job on several hosts, life after life. This process starts agents over ssh, compares what their hosts are, and decides
what comes after each life; it trains nothing, and needs no torch."""

import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from stagerun.base.errors import ExitCode, PeerError, UsageError
from stagerun.base.text import count, duration, to_nowhere
from stagerun.launch.compare import differences, troubles, worst
from stagerun.launch.facts import Facts, from_json
from stagerun.launch.hostfile import Host, read_hosts, workers
from stagerun.launch.options import RESTARTS, HostOptions
from stagerun.launch.remote import AGAIN_S, ANSWER_S, NO_ONE, Each, Message, Probe, Remote
from stagerun.launch.restarting import AGAIN, Again, Asking, Ended, Finish, LifeEnd, Lived, Policy, decide
from stagerun.launch.ssh import Bundle
from stagerun.launch.start import Orders
from stagerun.system import signals

# How long a host that was lost may take to answer before another life begins without it, or all ends.
_BACK_S, _NEEDED_S = 4.0, 20.0
_LOOK_S = 600.0  # for the first host's look at the schedule, its images and the output folder
_SAVED_S = 60.0  # beside the grace of workers that no one hears any more
# Of what the hosts print: characters that no one has read yet, and a line; a longer one is cut.
_MOST_UNREAD, _LONGEST_LINE = 16 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be done on the hosts. `facts`: what the agents are asked about, see `answering`. `check`: the number of workers
    against the schedule; RecipeError. `look`: asked of the first host before anything starts. `survey`: gets the facts of the hosts that
    are there, and why others are missing, by name; the exit code of a job that is not to start, or 0. Without it that is reported here.
    `again`: options of the command after a host was lost, since what comes then is not the same once more."""

    orders: Orders
    facts: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[int], None] = lambda size: None
    look: Mapping[str, Any] | None = None
    bundle: Bundle | None = None
    survey: Callable[[Mapping[str, Facts], Mapping[str, str]], int] | None = None
    again: tuple[str, ...] = ()


def on_hosts(task: Task, options: HostOptions) -> int:
    """The exit code. StagerunError for what keeps it from beginning."""
    assert options.hosts is not None
    hosts = read_hosts(options.hosts)
    least = len(hosts) if options.least is None else options.least
    if least > len(hosts):
        raise UsageError(f"--min-nodes {least}, but --hosts names {count(len(hosts), 'host')}")
    launch, code = _Launch(task, options, hosts, least), int(ExitCode.INTERRUPTED)
    try:
        code, text = launch.run()
        launch.printed.say(text)
    finally:
        if launch.started:
            signals.leave(code, "")
        launch.printed.close()
    return code


class _Launch:
    def __init__(self, task: Task, options: HostOptions, hosts: Sequence[Host], least: int) -> None:
        self.task, self.options, self.hosts = task, options, {host.name: host for host in hosts}
        restarts = RESTARTS if options.restarts is None else options.restarts
        self.policy = Policy(tuple(self.hosts), least, restarts)
        self.way = options.way(task.bundle)
        self.printed = Printed()
        self.asking = Asking()
        self.sees_out: frozenset[str] = frozenset()
        self.facts: dict[str, Facts] = {}
        self.restarts = 0
        self.started = False  # a life
        self.again = False  # one that followed upon the loss of a host
        self.refused: dict[str, str] = {}  # hosts that came back as others than they were, and what was said of them
        self.fruitless: dict[str, int] = {}  # how often a host answered, and then did not come
        self.lost_at = 0.0

    def run(self) -> tuple[int, str]:
        names, since = self.policy.hosts, 0.0
        while True:
            with Remote([self.hosts[name] for name in names], self.way, self.printed.show) as remote:
                wanted = names
                try:
                    names, shares = self._gather(remote, names)
                    if not self.started and (done := self._look(remote, names, sum(shares.values()))) is not None:
                        return done
                    self._ask_who_sees(remote, names)
                    endpoint = self._endpoint(remote, names)
                except _Lost as error:
                    if not self.started:
                        raise
                    names = wanted
                    end = LifeEnd(int(error.exit_code), error.render(), dict.fromkeys(error.hosts, ""), since)
                    back: set[str] = set()
                else:
                    if since:
                        passed = duration(time.monotonic() - since)
                        self.printed.say(f"the next start, {passed} after that host was last heard of")
                    end, back = self._live(remote, names, shares, endpoint)
            if end.lost:
                self.lost_at = time.monotonic()
                self.sees_out -= set(end.lost)
            step = self._step(end, names, back)
            if isinstance(step, Finish):
                return step.code, step.text
            self.printed.say(step.says)
            names, since = step.hosts, end.last_heard
            self.again |= bool(end.lost)
            self.restarts += step.failure
            time.sleep(step.wait)

    def _live(
        self, remote: Remote, names: tuple[str, ...], shares: Mapping[str, int], endpoint: str
    ) -> tuple[LifeEnd, set[str]]:
        """A life, and the hosts that have come back meanwhile."""
        self.asking.install()
        self.started = True
        with self._probe([name for name in self.hosts if name not in names]) as probe:

            def come() -> str:
                back = ", ".join(self._back(probe, names))
                return f"{back}: there again; all is saved now, to go on with it" if back else ""

            orders = self.task.orders
            if self.again:
                orders = replace(orders, command=(*orders.command, *self.task.again))
            life = Lived(remote, shares, endpoint, uuid.uuid4().hex, orders, self.asking, self.printed.say)
            end = life.to_its_end(come)
            if not self.asking:
                signals.leave(ExitCode.SAVED, "stopped between two lives of the run; run the same command again")
            self.printed.rest()
            return end, set(self._back(probe, names))

    def _step(self, end: LifeEnd, names: tuple[str, ...], back: set[str]) -> Finish | Again:
        if end.lost and not self.asking:
            with self._probe(end.lost) as probe:
                enough = len(names) - len(end.lost) >= self.policy.least
                last = time.monotonic() + (_BACK_S if enough else _NEEDED_S)
                while time.monotonic() < last and len(back & set(end.lost)) < len(end.lost) and not self.asking:
                    probe.look(0.2)
                    back |= set(self._back(probe, names))
        answering = {name for name in names if name not in end.lost} | back
        return decide(
            Ended(
                code=end.code,
                text=end.text,
                hosts=names,
                lost=tuple(end.lost),
                asked=bool(self.asking),
                answering=tuple(name for name in self.hosts if name in answering),
                sees_out=self.sees_out,
                releasing=self.again and time.monotonic() < self.lost_at + self.task.orders.grace + _SAVED_S,
                slept=end.slept,
                restarts=self.restarts,
            ),
            self.policy,
        )

    # -- before a life

    def _gather(self, remote: Remote, names: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, int]]:
        """The hosts that are there and alike, and how many workers each gets. PeerError, or as of what differs, if that won't do."""
        self.printed.plain = names[0]  # until it is known who is there
        each = {name: {"writes": name == names[0]} for name in names}
        answers = self._ask(remote, names, "facts", each, **self.task.facts)
        missing = [m for m in remote.receive(0.0) if m.kind in ("lost", "failed") and m.host not in answers]
        there = tuple(name for name in names if name in answers)
        self._same(answers)
        for name in names if self.started else ():
            self.fruitless[name] = 0 if name in answers else self.fruitless.get(name, 0) + 1
        self.printed.plain = (there or names)[0]
        facts = {name: _facts(name, answers[name]) for name in there}
        if self.task.survey is not None:
            if code := self.task.survey(facts, {m.host: _message_text(m) for m in missing}):
                raise _Refused(code, "")
        elif missing:
            self._missing(missing, there, names)
        if (before := self.facts.get(there[0])) is not None:
            _require_mounted(there[0], before, facts[there[0]])
        self.facts |= facts
        if self.task.survey is None:
            self._compare({name: self.facts[name] for name in there})
        usual = {name: int(answers[name]["devices"]) for name in there}
        shares = workers([self.hosts[name] for name in there], self.options.per_node, usual)
        self.task.check(sum(shares.values()))
        return there, shares

    def _missing(self, missing: Sequence[Message], there: tuple[str, ...], names: tuple[str, ...]) -> None:
        lines = [_message_text(m) for m in missing]
        if names[0] not in there and not self.started:
            lines.append(f"{names[0]} stands first, so rank 0 and the output folder are to be there")
        elif len(there) >= self.policy.least and (names[0] in there or there[0] in self.sees_out):
            self.printed.say("\n".join([*lines, f"going on with {count(len(there), 'host')}"]))
            return
        elif self.policy.least < len(self.hosts):
            lines.append(f"{count(len(there), 'host')} left of at least {self.policy.least}")
        raise _Lost("\n".join(lines), [name for name in names if name not in there])

    def _same(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Two names of one host. UsageError."""
        first: dict[str, str] = {}
        for name, answer in answers.items():
            if (other := first.setdefault(answer["machine"], name)) != name:
                raise UsageError(f"{other} and {name} are the same host", f"for two workers on it write `{other}:2`")

    def _ask(
        self,
        remote: Remote,
        names: Sequence[str],
        question: str,
        each: Each = NO_ONE,
        limit: float = ANSWER_S,
        **words: Any,
    ) -> dict[str, dict[str, Any]]:
        def waiting_for(hosts: Sequence[str]) -> None:
            self.printed.say(f"waiting for {', '.join(hosts)}")

        return remote.ask(names, question, each, limit, waiting_for, **words)

    def _compare(self, facts: dict[str, Facts]) -> None:
        found = [*troubles(facts), *differences(facts)]
        if code := worst(found):
            raise _Refused(code, "\n".join(one.render() for one in found))
        if not self.started:
            self.printed.say("\n".join(one.render() for one in found))

    def _look(self, remote: Remote, names: tuple[str, ...], size: int) -> tuple[int, str] | None:
        """What the first host finds before anything starts: an exit code and text, or nothing."""
        if self.task.look is None:
            return None
        answers = self._ask(remote, names[:1], "look", limit=_LOOK_S, size=size, **self.task.look)
        if names[0] not in answers:
            raise PeerError(_why(remote.receive(0.0), names[0]))
        answer = answers[names[0]]
        return None if answer.get("code") is None else (int(answer["code"]), str(answer["text"]))

    def _ask_who_sees(self, remote: Remote, names: tuple[str, ...]) -> None:
        """What the first host writes: one of those may go on in its place. Asked before each life, since a host that comes back may have
        come without that file system."""
        self.sees_out = frozenset(names[:1])
        if self.task.look is None or self.policy.least == len(self.hosts) or len(names) == 1:
            return
        marked = self._ask(remote, names[:1], "mark", **self.task.facts)
        if names[0] in marked:
            path = marked[names[0]]["path"]
            seen = self._ask(remote, names[1:], "sees", path=path)
            self._ask(remote, names[:1], "unmark", path=path)
            self.sees_out |= {name for name, words in seen.items() if words["seen"]}

    def _endpoint(self, remote: Remote, names: tuple[str, ...]) -> str:
        """Where the workers meet: an address of the first host's that the others know it by."""
        answers = self._ask(remote, names, "meet", name=self.hosts[names[0]].address)
        head = names[0]
        port = self._ask(remote, [head], "port")
        if len(answers) < len(names) or head not in port:
            lost = [name for name in names if name not in answers] or [head]
            raise _Lost(_why(remote.receive(0.0), ", ".join(lost)), lost)
        if len(names) == 1:
            return f"127.0.0.1:{port[head]['port']}"
        own = answers[head]["own"]
        known = [a for name in names[1:] for a in answers[name]["addresses"]] + answers[head]["addresses"]
        if len(own) == 1:
            known += own  # the only one that there is, whatever it is called by
        address = next((a for a in known if a in own), None)
        if address is None:
            raise PeerError(
                f"{head} has the addresses {', '.join(own) or 'of its loopback device alone'}, and the other hosts know it by none of "
                f"these, but by {', '.join(dict.fromkeys(known)) or 'none'}",
                "name it in the host file by a name or address by which the others reach it",
            )
        return f"{address}:{port[head]['port']}"

    # -- hosts that are gone

    def _probe(self, names: Sequence[str] | Mapping[str, str]) -> Probe:
        rests = {name: AGAIN_S * 2 ** min(times, 10) for name, times in self.fruitless.items() if times}
        hosts = {name: self.hosts[name] for name in names}
        return Probe(self.way, hosts, {**self.task.facts, "writes": False}, rests)

    def _back(self, probe: Probe, names: tuple[str, ...]) -> list[str]:
        """Those that answer again, and are as they should be."""
        probe.look()
        fit = []
        for name, answer in list(probe.answers.items()):
            others = {other: self.facts[other] for other in names if other != name}
            try:
                facts = {**others, name: _facts(name, answer)}
                found = [one.render() for one in (*troubles(facts), *differences(facts)) if one.code]
            except UsageError as error:
                found = [error.render()]
            if found:
                text = "\n".join([*found, f"{name} is left out until it is as before"])
                if self.refused.get(name) != text:
                    self.printed.say(text)
                self.refused[name] = text
                probe.again(name)
            else:
                fit.append(name)
        return fit


def _facts(host: str, answer: Mapping[str, Any]) -> Facts:
    """UsageError where they are of another stagerun, and say other things."""
    try:
        return from_json(answer["facts"])
    except ValueError:
        raise UsageError(
            f"{host} has another stagerun than this host",
            "install the same on all, or let `--sync --sync-code` copy it",
        ) from None


def _require_mounted(host: str, before: Facts, now: Facts) -> None:
    """The output folder of a host that may have been away meanwhile. PeerError."""
    if before.out and now.out and (before.out.kind, before.out.source) != (now.out.kind, now.out.source):
        raise PeerError(
            f"{host} is back, and its output folder is on {now.out.source} ({now.out.kind}); before it was on {before.out.source} "
            f"({before.out.kind})",
            f"mount that there again; then {AGAIN}",
        )


class _Lost(PeerError):
    """`hosts`: that are missing."""

    def __init__(self, text: str, hosts: Sequence[str]) -> None:
        super().__init__(text)
        self.hosts = hosts


class _Refused(PeerError):
    """With the exit code of what was found."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = ExitCode(code)


def _why(messages: Sequence[Message], host: str) -> str:
    lines = [_message_text(m) for m in messages if m.kind in ("lost", "failed")]
    return "\n".join(lines) or f"{host} does not answer\n  hint: {AGAIN}"


def _message_text(message: Message) -> str:
    text = message.words["text"] if message.kind == "lost" else f"{message.host}: {message.words['text']}"
    return text + (f"\n  hint: {message.words['hint']}" if message.words.get("hint") else "")


# -- what is printed


class Printed:
    """What is printed on the hosts, and said of them. `plain`: the host whose words come as they are, since rank 0 speaks for all; those of
    others have the host's name before each line. A thread writes them: one that writes to `less`, or to a terminal after Ctrl-S,
    waits for its reader, and hosts that hear nothing meanwhile would take the launcher for gone."""

    def __init__(self) -> None:
        self.plain = ""
        self._unended: dict[tuple[str, str], str] = {}
        self._texts: queue.Queue[tuple[str, str]] = queue.Queue()
        self._size = self._dropped = 0
        self._lock = threading.Lock()
        with signals.held():
            threading.Thread(target=self._write_all, name="printed", daemon=True).start()

    def show(self, host: str, stream: str, text: str) -> None:
        if host != self.plain:
            *lines, rest = (self._unended.pop((host, stream), "") + text).split("\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], ""
            self._unended[host, stream] = rest
            text = "".join(f"{host}: {line}\n" for line in lines)
        self._put(stream, text)

    def say(self, text: str) -> None:
        """The launcher's own words, on stderr."""
        if text:
            self._put("err", f"{text}\n")

    def rest(self) -> None:
        """Lines without an end."""
        for (host, stream), text in self._unended.items():
            if text:
                self._put(stream, f"{host}: {text}\n")
        self._unended.clear()

    def close(self) -> None:
        """Returns when all is written."""
        self.rest()
        self._tell_dropped()
        self._texts.join()

    def _put(self, stream: str, text: str) -> None:
        with self._lock:
            full = self._size + len(text) > _MOST_UNREAD
        if full:
            self._dropped += text.count("\n")
            return
        self._tell_dropped()
        self._queue(stream, text)

    def _queue(self, stream: str, text: str) -> None:
        with self._lock:
            self._size += len(text)
        self._texts.put((stream, text))

    def _tell_dropped(self) -> None:
        if dropped := self._dropped:
            self._dropped = 0
            self._queue("err", f"{count(dropped, 'line')} left out here: no one read what is printed\n")

    def _write_all(self) -> None:
        while True:
            stream, text = self._texts.get()
            self._write(stream, text)
            with self._lock:
                self._size -= len(text)
            self._texts.task_done()

    def _write(self, stream: str, text: str) -> None:
        to = sys.stdout if stream == "out" else sys.stderr
        encoding = to.encoding or "utf-8"
        try:
            to.write(text.encode(encoding, "backslashreplace").decode(encoding))
            to.flush()
        except OSError:  # no one reads any more; the run goes on
            with suppress(OSError):
                to_nowhere(to)
