"""What an agent says of its host, and does there before workers are started."""

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

from stagerun.base.errors import StagerunError
from stagerun.command.options import command
from stagerun.command.shared import output_folder
from stagerun.language import load
from stagerun.launch.agent import Agent
from stagerun.launch.facts import host_facts
from stagerun.launch.worker_count import devices
from stagerun.system.host import host_name
from stagerun.system.process import boot_id
from stagerun.train.first_look import look_first
from stagerun.train.options import RunOptions

Question = dict[str, Any]
_SEEN, _LEFT_S = ".seen-", 3600.0


def _facts(question: Question) -> dict[str, Any]:
    """`folder`, `overrides`, `out` of the command; `writes`: rank 0 will be here. `devices`: workers that are usual here."""
    found = host_facts(question["folder"], tuple(question["overrides"]), question["out"], writes=question["writes"])
    return {"facts": found.as_json(), "devices": _usual(question), "machine": _machine()}


def _machine() -> str:
    """The same under two names of one host, and for no two hosts."""
    boot = boot_id()
    return f"{boot} {host_name()}" if boot else uuid.uuid4().hex


def _usual(question: Question) -> int:
    try:
        return devices(load(question["folder"], question["overrides"]))
    except StagerunError:  # which the facts tell
        return 1


def _look(question: Question) -> dict[str, Any]:
    """On the first host: what `run` finds and prints before workers are started. `code` where it ends there."""
    words = question["options"]
    named: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}
    options = RunOptions(**named)
    try:
        schedule = load(options.folder, options.overrides)
        code = look_first(options, schedule, question["size"])
    except StagerunError as error:
        return {"code": int(error.exit_code), "text": error.render()}
    return {"code": None if code is None else int(code), "text": ""}


def _mark(question: Question) -> dict[str, Any]:
    """On the first host: `path` of a new file that whoever sees the output folder sees, until `unmark`. '': it can't be made, so no one
    will. Those of launchers that were killed in between go with the next one."""
    try:
        out = output_folder(load(question["folder"], question["overrides"]).name, question["out"])
        mark = out / f"{_SEEN}{uuid.uuid4().hex}"
        mark.touch()
        now = mark.stat().st_mtime  # by the clock of who keeps the files
        for other in out.glob(f"{_SEEN}*"):
            with contextlib.suppress(OSError):
                if other.stat().st_mtime < now - _LEFT_S:
                    other.unlink()
    except (StagerunError, OSError):
        return {"path": ""}
    return {"path": str(mark)}


def _sees(question: Question) -> dict[str, Any]:
    return {"seen": bool(question["path"]) and os.path.exists(question["path"])}


def _unmark(question: Question) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        Path(question["path"]).unlink()
    return {}


ANSWERS = {"facts": _facts, "look": _look, "mark": _mark, "sees": _sees, "unmark": _unmark}


@command(hidden=True)
def agent() -> None:
    """Serves a launcher on another host, which speaks to it over stdin and stdout. Not for people."""
    Agent(ANSWERS).run()
