"""Doing things on some ranks that all must agree about: rank 0 decides, or everybody tries, and an error reaches all."""

import json
from collections.abc import Callable

from stagerun.comm import Comm
from stagerun.errors import ExitCode, StagerunError
from stagerun.system.host import host_name


class ToldByAnother(StagerunError):
    """Raised on a rank whose peer tells the user: same exit code, nothing to print."""

    def __init__(self, code: int) -> None:
        super().__init__("")
        self.exit_code = ExitCode(code)


class SeveralFailed(StagerunError):
    """What some ranks met, each on lines of its own, with its host."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(code)


def rank0(comm: Comm, decide: Callable[[], object]) -> object:
    """`decide()` of rank 0 on every rank; it answers with something JSON can hold. Collective.

    A StagerunError of rank 0's is raised there, and ToldByAnother elsewhere, so that no one waits for a rank that is gone.
    """
    if comm.rank == 0:
        try:
            answer = decide()
        except StagerunError as error:
            comm.broadcast_bytes(json.dumps({"code": int(error.exit_code)}).encode())
            raise
        comm.broadcast_bytes(json.dumps({"code": 0, "answer": answer}).encode())
        return answer
    told = json.loads(comm.broadcast_bytes(None))
    if told["code"]:
        raise ToldByAnother(told["code"])
    return told["answer"]


def everyone(comm: Comm, do: Callable[[], None]) -> None:
    """`do()` on every rank. Collective. When any raised a StagerunError, rank 0 raises them all as one."""
    mine: StagerunError | None = None
    try:
        do()
    except StagerunError as error:
        mine = error
    host = host_name()
    status = {"code": int(mine.exit_code), "text": mine.render(), "host": host} if mine else {"code": 0}
    statuses = [json.loads(s) for s in comm.gather_bytes(json.dumps(status).encode())]
    failed = [(rank, s) for rank, s in enumerate(statuses) if s["code"]]
    if not failed:
        return
    code = failed[0][1]["code"]
    if comm.rank != 0:
        raise ToldByAnother(code)
    if mine is not None and all(s["text"] == failed[0][1]["text"] for _, s in failed):
        raise mine
    raise SeveralFailed(code, "\n".join(f"rank {rank} on {s['host']}: {s['text']}" for rank, s in failed))
