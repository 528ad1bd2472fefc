"""PMI-1, the text protocol by which the processes of an MPI's launcher (hydra, Intel MPI, srun --mpi=pmi2) tell each other
of themselves: lines of `name=value` words on the descriptor in PMI_FD. No library is needed."""

import os
import socket
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

_LONGEST = 1 << 16


class Pmi1:
    """Opened at most once in the life of a process. OSError where the launcher is gone or answers with an error;
    TimeoutError after `timeout` seconds without an answer, which a fence waits for until all processes have come there."""

    def __init__(self, environment: Mapping[str, str], timeout: float) -> None:
        descriptor = os.dup(_descriptor(environment))
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            self._socket: socket.socket | None = socket.socket(fileno=descriptor)
            self._socket.settimeout(timeout)
            self._stream: Any = None
        else:
            self._socket, self._stream = None, cast(BinaryIO, os.fdopen(descriptor, "r+b", buffering=0))
        self._came = b""
        self._ask("init", "response_to_init", pmi_version="1", pmi_subversion="1")
        self._space = self._ask("get_my_kvsname", "my_kvsname")["kvsname"]

    def put(self, key: str, value: str) -> None:
        """Neither holds a space."""
        self._ask("put", "put_result", kvsname=self._space, key=key, value=value)

    def fence(self) -> None:
        self._ask("barrier_in", "barrier_out")

    def get(self, rank: int, key: str) -> str:
        """The space of names is one for all ranks, so keys tell who has put them."""
        return self._ask("get", "get_result", kvsname=self._space, key=key)["value"]

    def close(self) -> None:
        self._ask("finalize", "finalize_ack")

    def _ask(self, command: str, expected: str, **words: str) -> dict[str, str]:
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in words.items())])
        self._send(line.encode() + b"\n")
        answer = dict(word.partition("=")[::2] for word in self._line().split() if "=" in word)
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise OSError(f"the launcher's answer to {command} was {answer}")
        return answer

    def _send(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.sendall(data)
        else:
            self._stream.write(data)

    def _line(self) -> str:
        while b"\n" not in self._came:
            data = self._socket.recv(4096) if self._socket is not None else self._stream.read(4096)
            if not data or len(self._came) > _LONGEST:
                raise OSError("the launcher is gone")
            self._came += data
        line, _, self._came = self._came.partition(b"\n")
        return line.decode(errors="replace")


def _descriptor(environment: Mapping[str, str]) -> int:
    try:
        return int(environment["PMI_FD"])
    except ValueError as error:
        raise OSError(f"PMI_FD={environment['PMI_FD']} is no descriptor") from error
