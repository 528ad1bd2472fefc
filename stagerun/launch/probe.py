"""Hosts that are gone, asked again and again whether they are back, while the others go on."""

import time
from collections.abc import Mapping
from typing import Any

from stagerun.launch.hostfile import Host
from stagerun.launch.remote import Remote
from stagerun.launch.ssh import Way

# Between the end of one attempt and the next; an attempt at a host that is switched off takes ssh.CONNECT_S.
AGAIN_S = 15.0
_SENDING_S = 0.1  # of each look, for a bundle


class Probe:
    """`question`: what they are asked; who answers is back. `rests`: seconds before the first time, by host."""

    def __init__(
        self, way: Way, hosts: Mapping[str, Host], question: Mapping[str, Any], rests: Mapping[str, float]
    ) -> None:
        self._hosts, self._question = hosts, question
        self._remote = Remote((), way, lambda host, stream, text: None)
        self._next = {name: time.monotonic() + rests.get(name, 0.0) for name in hosts}
        self.answers: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *of_error: object) -> None:
        self._remote.__exit__(None, None, None)

    def look(self, timeout: float = 0.0) -> None:
        """Brings `answers` up to date."""
        now = time.monotonic()
        for name, due in self._next.items():
            if now >= due:
                self._next[name] = float("inf")
                self._remote.add(self._hosts[name])
                self._remote.put(name, "facts", **self._question)
        messages = self._remote.receive(timeout)
        while self._remote.leaving and time.monotonic() < now + timeout + _SENDING_S:
            messages += self._remote.receive(0.01)
        for message in messages:
            if message.kind == "answer":
                self.answers[message.host] = message.words
            elif message.kind in ("lost", "failed"):
                self._later(message.host)

    def again(self, host: str) -> None:
        """What it answered won't do."""
        self._remote.drop(host)
        self._later(host)

    def _later(self, host: str) -> None:
        self.answers.pop(host, None)
        self._next[host] = time.monotonic() + AGAIN_S
