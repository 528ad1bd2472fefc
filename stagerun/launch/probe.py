"""Hosts that are gone, asked again and again whether they are back, while the others go on."""

import time
from collections.abc import Mapping
from typing import Any

from stagerun.launch.hostfile import Host
from stagerun.launch.remote import Remote
from stagerun.launch.ssh import Way

# Between the end of one attempt and the next; an attempt at a host that is switched off takes ssh.CONNECT_S.
AGAIN_S = 15.0


class Probe:
    """`question`: what they are asked; who answers is back."""

    def __init__(self, way: Way, hosts: Mapping[str, Host], question: Mapping[str, Any]) -> None:
        self._hosts, self._question = hosts, question
        self._remote = Remote((), way, lambda host, stream, text: None)
        self._next = dict.fromkeys(hosts, 0.0)
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
                self._remote.send(name, "ask", question="facts", **self._question)
        for message in self._remote.receive(timeout):
            if message.kind == "answer":
                self.answers[message.host] = message.words
            elif message.kind in ("lost", "failed"):
                self.answers.pop(message.host, None)
                self._next[message.host] = time.monotonic() + AGAIN_S
