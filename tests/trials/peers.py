"""The trainers, with the documented settings that their rows rest on, and what they don't offer."""

import subprocess
import sys
from functools import cache
from pathlib import Path

from trial import Peer


def peers(environments: Path) -> list[Peer]:
    def python(name: str) -> Path:
        return environments / name / "bin" / "python"

    return [
        Peer(
            "stagerun",
            Path(sys.executable),
            "on_stagerun.py",
            lacks={"best": "keeps the newest snapshots and the ends of stages"},
        ),
        Peer("Lightning", python("lightning"), "on_lightning.py", settings={}),
        Peer("Accelerate", python("accelerate"), "on_accelerate.py", lacks={"nan": "leaves the loop to its user"}),
        Peer(
            "Keras",
            python("keras"),
            "on_keras.py",
            lacks={
                "processes": "`fit` on torch runs in one process",
                "uneven": "`fit` on torch runs in one process",
            },
        ),
        Peer("timm", python("timm"), "on_timm.py", lacks={"patience": "no early stopping"}),
    ]


PACKAGES = {
    "stagerun": "torch",
    "Lightning": "lightning torch torchdata",
    "Accelerate": "accelerate torch torchdata",
    "Keras": "keras torch",
    "timm": "timm torch",
    "Composer": "mosaicml torch",
}


@cache
def versions(name: str, python: Path) -> str:
    code = "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *PACKAGES[name].split()], capture_output=True, text=True)
    return done.stdout.strip()
