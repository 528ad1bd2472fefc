"""What an agent tells of its host, and does there before workers are started."""

import contextlib
import os
import uuid
from pathlib import Path
from typing import Any

from stagerun.cli.options import output_folder
from stagerun.cli.running import RunOptions, look_first
from stagerun.cli.workers import devices
from stagerun.errors import StagerunError
from stagerun.preflight.facts import host_facts
from stagerun.spec import load

Question = dict[str, Any]


def _facts(question: Question) -> dict[str, Any]:
    """`folder`, `overrides`, `out` of the command; `writes`: rank 0 will be here. `devices`: workers that are usual here."""
    found = host_facts(question["folder"], tuple(question["overrides"]), question["out"], writes=question["writes"])
    return {"facts": found.as_json(), "devices": _usual(question)}


def _usual(question: Question) -> int:
    try:
        return devices(load(question["folder"], question["overrides"]))
    except StagerunError:  # which the facts tell
        return 1


def _look(question: Question) -> dict[str, Any]:
    """On the first host: what `run` finds and prints before workers are started. `code` where it ends there. `mark`: a file that whoever
    sees the output folder sees, until `unmark`."""
    words = question["options"]
    named: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in words.items()}
    options = RunOptions(**named)
    try:
        schedule = load(options.folder, options.overrides)
        code = look_first(options, schedule, question["size"])
        if code is not None:
            return {"code": int(code), "text": ""}
        mark = output_folder(schedule.name, options.out) / f".seen-{uuid.uuid4().hex}"
        mark.touch()
    except StagerunError as error:
        return {"code": int(error.exit_code), "text": error.render()}
    except OSError:  # others will not see it, either
        return {"code": None, "mark": ""}
    return {"code": None, "mark": str(mark)}


def _sees(question: Question) -> dict[str, Any]:
    return {"seen": bool(question["path"]) and os.path.exists(question["path"])}


def _unmark(question: Question) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        Path(question["path"]).unlink()
    return {}


ANSWERS = {"facts": _facts, "look": _look, "sees": _sees, "unmark": _unmark}
