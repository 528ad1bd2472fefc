"""How the processes of an MPI's launcher tell each other of themselves, without an MPI or a library of our own: PMI-1 and PMIx."""

import ctypes
import glob
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from ctypes import POINTER, byref, c_bool, c_char, c_char_p, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Any, BinaryIO, cast

_LONGEST = 1 << 16


class Pmi1:
    """The text protocol of hydra, Intel MPI and `srun --mpi=pmi2`: lines of `name=value` words on the descriptor in PMI_FD.

    Opened at most once in the life of a process. OSError where the launcher is gone or answers with an error;
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


_GLOBAL, _BOOL, _STRING = 3, 1, 3  # PMIX_GLOBAL, PMIX_BOOL, PMIX_STRING


class _Process(ctypes.Structure):
    _fields_ = (("space", c_char * 256), ("rank", c_uint32))


class _Value(ctypes.Structure):
    """pmix_value_t: a tag and a union, of which the largest member is smaller than what stands here."""

    _fields_ = (("type", c_uint16), ("string", c_char_p), ("rest", c_uint64 * 6))


class _Truth(ctypes.Structure):
    """A pmix_value_t that holds one."""

    _fields_ = (("type", c_uint16), ("_gap", c_uint8 * 6), ("value", c_bool), ("rest", c_uint64 * 6))


class _Info(ctypes.Structure):
    """pmix_info_t."""

    _fields_ = (("key", c_char * 512), ("flags", c_uint32), ("held", _Truth))


class Pmix:
    """OSError where there is no libpmix, or the launcher answers with an error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._library = _load(environment)
        self._me = _Process()
        self._call("PMIx_Init", byref(self._me), None, c_size_t(0))

    def put(self, key: str, value: str) -> None:
        held = _Value(type=_STRING, string=value.encode())
        self._call("PMIx_Put", c_uint8(_GLOBAL), key.encode(), byref(held))
        self._call("PMIx_Commit")

    def fence(self) -> None:
        """Returns when all processes have come here, and what they had put can be read."""
        # All values are handed out here: asked for one by one afterwards, a rank that has gone on may not be there to answer.
        collect = _Info(key=b"pmix.collect", held=_Truth(type=_BOOL, value=True))
        self._call("PMIx_Fence", None, c_size_t(0), byref(collect), c_size_t(1))

    def get(self, rank: int, key: str) -> str:
        process, answer = _Process(space=self._me.space, rank=rank), POINTER(_Value)()
        self._call("PMIx_Get", byref(process), key.encode(), None, c_size_t(0), byref(answer))
        if not answer or answer.contents.type != _STRING:
            raise OSError(f"PMIx_Get of `{key}` gave no text")
        return (answer.contents.string or b"").decode(errors="replace")

    def close(self) -> None:
        self._call("PMIx_Finalize", None, c_size_t(0))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} ended with status {code}")


def _load(environment: Mapping[str, str]) -> ctypes.CDLL:
    """The library of the launcher itself, where it says where it is: its version fits. Else the system's."""
    for place in _places(environment):
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise OSError("there is no libpmix.so.2 here")


def _places(environment: Mapping[str, str]) -> Iterator[str]:
    for name in ("PMIX_PREFIX", "OPAL_PREFIX", "PRTE_PREFIX"):
        if root := environment.get(name):
            yield from sorted(glob.glob(os.path.join(glob.escape(root), "lib*", "**", "libpmix.so.2"), recursive=True))
    yield "libpmix.so.2"
    yield from sorted(glob.glob("/usr/lib/*/pmix*/lib/libpmix.so.2"))
