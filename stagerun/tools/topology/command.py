"""`stagerun topology`: a machine, what each worker would get of it, and whether `run` would bind it there."""

import json
import os
from pathlib import Path

import click

from stagerun.base.errors import StorageError, UsageError
from stagerun.base.text import count
from stagerun.command.options import command, option
from stagerun.command.shared import Json
from stagerun.launch.placing import Plan, make_plan
from stagerun.launch.sharing import choose, default_workers
from stagerun.system.cores import Machine, read
from stagerun.system.world import default_threads
from stagerun.tools.topology.described import as_json, describe, parse, picture


@command()
def topology(
    workers_per_node: int | None = option(
        "--workers-per-node N", "Workers on this machine.  [default: as `run`]", least=1
    ),
    comm_cores: int | None = option(
        "--comm-cores N",
        "Cores of each worker that are set apart for all that doesn't compute.  [default: one in 12, at most 4]",
        least=0,
    ),
    faked: str | None = option("--faked FILE", "Another machine, described in FILE, in place of this one."),
    save: str | None = option("--save FILE", "Also write the machine's description into FILE."),
    as_json: Json = False,
) -> None:
    """Draws this machine's cores, and which of them each worker gets where `run` binds them.

    A worker has whole cores of one NUMA node, all workers as many. Most of them compute, one thread each; of 12 or more the last
    ones (1 of 12) are set apart for communication, loading, saving and the monitor. With GPUs a worker has cores near its GPU.

    FILE holds a line for each NUMA node, its cores and GPUs, and what a job may use of them:

    \b
      node 0 socket 0 memory 96G    socket and memory may be left out
      cores 0-23 siblings 48-71     first CPUs of the cores; second ones (SMT)
      gpu 0 NVIDIA H200             at this node; before all nodes: at none
      node 1 socket 1 memory 96G
      cores 24-43 siblings 72-91
      cores 44-47 slow              of the slower kind, where there are two
      allowed 0-15,48-63            the job's affinity or cpuset; default: all
      quota 4                       its control group's processors
    """
    click.echo(draw(workers_per_node, comm_cores, faked, save, as_json), nl=False)


def draw(workers: int | None, comm_cores: int | None, faked: str | None, save: str | None, json_wanted: bool) -> str:
    """The whole output. RecipeError, UsageError, StorageError."""
    machine = _described(faked) if faked is not None else read(Path("/"), os.environ)
    if save is not None:
        try:
            Path(save).write_text(describe(machine))
        except OSError as error:
            raise StorageError(f"{save} can't be written: {error.strerror}") from error
    number = workers or default_workers(machine)
    plan = make_plan(machine, number, comm_cores)
    environment = {} if faked is not None else os.environ
    choice = choose(machine, number, 1, environment)
    if json_wanted:
        found = as_json(machine, plan)
        found["auto"] = {"bind": choice.bind and bool(plan.seats), "why": choice.why}
        return json.dumps(found) + "\n"
    return picture(machine, plan, _bound(plan, number, choice.bind, choice.why, faked is not None))


def _bound(plan: Plan, workers: int, bind: bool, why: str, faked: bool) -> str:
    """What `run` would do, as a sentence."""
    who = "" if faked else "here, "
    if not plan.seats:
        return ""
    if bind:
        return f"{who}`run --nproc {workers}` binds by itself: {why}"
    text = f"{who}`run --nproc {workers}` binds only with --bind cores: {why}"
    if not faked and (threads := default_threads(workers)) != plan.threads:
        text += f"; without it a worker has {count(threads, 'thread')}"
    return text


def _described(faked: str) -> Machine:
    try:
        text = Path(faked).read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(
            f"--faked {faked} can't be read: {why}", "`stagerun topology --save FILE` writes one"
        ) from error
    return parse(text, faked)
