"""The job's store, in which its workers meet: our launcher's file where all are on one machine, or else a server in rank 0 or in torchrun."""

import ipaddress
import os
import re
import socket
from pathlib import Path

import torch
import torch.distributed as dist

from stagerun.system.world import STORE_FILE, World


def private() -> dist.Store | None:
    """The file in which workers of one machine meet; None where they meet over a network. RuntimeError."""
    path = Path(os.environ.get("STAGERUN_REPORT_DIR", ""), STORE_FILE)
    return dist.FileStore(str(path)) if "STAGERUN_REPORT_DIR" in os.environ and path.exists() else None


def served(world: World) -> dist.TCPStore | None:
    """On rank 0, the server of the job's store, where no launcher serves it and this host has the address that the others reach; it lives as
    long as what is returned. Else None, and torch's own server listens on all interfaces. A name may mean another address on another host."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if world.rank or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not port.isdecimal():
        return None
    try:
        if world.local_size < world.size:
            ipaddress.ip_address(address)
        family, *_, place = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place, family=family)
        number = listener.getsockname()[1]
        # `multi_tenant`: a process has one server per port, whoever of torch's wants it.
        return dist.TCPStore(
            address, number, None, True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    except (OSError, RuntimeError, ValueError):
        return None


# How gloo, NCCL and the store say that another process is gone, and what is the matter with this one alone.
_GONE = re.compile(r"gloo/|nccl|connect|socket|broken pipe|peer|pair|timed out|timeout|stop_waiting", re.I)
_HERE = re.compile(r"out of memory|allocate memory|cuda (error|failure)|open files|no space left", re.I)


def misses_a_peer(error: RuntimeError) -> bool:
    """Whether a collective, or a call of the store, failed because another process is gone or out of reach."""
    if isinstance(error, torch.OutOfMemoryError) or _HERE.search(str(error)):
        return False
    return isinstance(error, dist.DistError) or _GONE.search(str(error)) is not None


# What gloo writes around what happened: a place in its source, and advice that the hint above gives, too.
_PLACE, _ADVICE = re.compile(r"\[\S+:\d+\]\s*"), ". This is typically caused by"


def first_words(error: Exception) -> str:
    """What happened, of an error of torch's."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _PLACE.sub("", lines[0]).partition(_ADVICE)[0]
