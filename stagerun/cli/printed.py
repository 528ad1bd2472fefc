"""What is printed on other hosts, here: the first host's as it is, since rank 0 speaks for all; others' with their name before each line."""

import sys
from contextlib import suppress
from typing import TextIO

from stagerun.report.console import print_nowhere


class Printed:
    """`plain`: the host whose words come as they are."""

    def __init__(self) -> None:
        self.plain = ""
        self._begun: dict[tuple[str, str], str] = {}

    def show(self, host: str, stream: str, text: str) -> None:
        to = sys.stdout if stream == "out" else sys.stderr
        if host != self.plain:
            *lines, rest = (self._begun.pop((host, stream), "") + text).split("\n")
            self._begun[host, stream] = rest
            text = "".join(f"{host}: {line}\n" for line in lines)
        self._write(to, text)

    def rest(self) -> None:
        """Lines without an end."""
        for (host, stream), text in self._begun.items():
            if text:
                self._write(sys.stdout if stream == "out" else sys.stderr, f"{host}: {text}\n")
        self._begun.clear()

    def _write(self, to: TextIO, text: str) -> None:
        try:
            to.write(text)
            to.flush()
        except OSError:  # nobody reads any more; the run goes on
            with suppress(OSError):
                print_nowhere()
