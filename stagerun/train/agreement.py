"""The first thing that the workers of a job do together: whether they are of one code and have one schedule and the same images."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

import stagerun
from stagerun.comm import Comm
from stagerun.preflight.compare import Finding, differences, stagerun_of, unlike, worst
from stagerun.preflight.facts import Facts, Trouble, from_json, host_facts, image_facts, settings_digest, with_settings
from stagerun.preflight.machine import code_digest, version
from stagerun.recipe import Schedule
from stagerun.train.together import SeveralFailed, ToldByAnother
from stagerun.world import World


def require_same_code(comm: Comm) -> None:
    """StagerunError, on rank 0, where hosts have another stagerun or torch, naming the odd ones. Collective.

    Before anything else is told to one another: what ranks of different code would wait for is different, too.
    """
    if comm.size > 1:
        mine = f"{stagerun.__version__} {version('torch').partition('+')[0]} {code_digest()}"
        _agree(comm, mine, lambda: host_facts(None))


def require_same_schedule(comm: Comm, world: World, schedule: Schedule) -> None:
    """The same where schedules or images differ. Not only what training depends on is compared: ranks that evaluate at other iterations
    would wait for each other for ever. Images are looked at by one worker of each host; what is missing is told when they are opened.
    Collective."""
    if comm.size == 1:
        return
    images = tuple(image_facts(schedule.data, list[Trouble]())) if world.local_rank == 0 else ()
    mine = [settings_digest(schedule)]
    mine += [i.seen.fingerprint or f"{i.seen.size} {i.seen.ends}" if i.seen else "" for i in images]

    def facts() -> Facts:
        return replace(with_settings(host_facts(None), schedule), images=images)

    _agree(comm, " ".join(mine), facts, "" if images else mine[0])


def _agree(comm: Comm, mine: str, facts: Callable[[], Facts], part: str = "") -> None:
    """Two small collectives where all have the `mine` of rank 0; else the facts of all ranks are compared, each as it is. A rank that knows
    less has only that `part` of it, which is the first word of the others'."""
    first = comm.broadcast_bytes(mine.encode() if comm.rank == 0 else None).decode()
    same = first.split(" ")[0] == part if part else first == mine
    others = torch.tensor([float(not same)])
    comm.all_reduce(others)()
    if not others:
        return
    told = [json.loads(data) for data in comm.gather_bytes(json.dumps(facts().as_json()).encode())]
    try:
        found = [from_json(one) for one in told]
    except ValueError:
        called = _names([str(one.get("host")) for one in told], [stagerun_of(one) for one in told])
        refuse(comm, unlike(dict(zip(called, told, strict=True))))
    seen = {one.host: one.images for one in reversed(found) if one.images}  # of the workers of a host one has looked
    found = [replace(one, images=one.images or seen.get(one.host, ())) for one in found]
    names = _names([one.host for one in found], [_digest(one) for one in found])
    refusals = [finding for finding in differences(dict(zip(names, found, strict=True))) if finding.code]
    if refusals:
        refuse(comm, refusals)


def refuse(comm: Comm, findings: Sequence[Finding]) -> NoReturn:
    """On all ranks; rank 0 tells why."""
    code = worst(findings)
    if comm.rank != 0:
        raise ToldByAnother(code)
    raise SeveralFailed(code, "\n".join(finding.render() for finding in findings))


def _digest(one: Facts) -> str:
    said = (sorted(one.versions.items()), one.code, one.settings, one.images)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _names(hosts: Sequence[str], states: Sequence[str]) -> list[str]:
    """What each rank is called: by its host, where all of the host are alike; else by its number, too."""
    kinds = Counter(host for host, _ in set(zip(hosts, states, strict=True)))
    return [host if kinds[host] == 1 else f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
