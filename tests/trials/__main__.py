"""Public bug reports' situations, tried on stagerun and other trainers: RESULTS.md."""

import argparse
import json
import subprocess
import sys
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

from situations import TABLE
from trial import Invalid, Peer, Trial

PAGE = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- written by scripts/dev trials --write -->", "<!-- end -->"
Results = dict[str, dict[str, str]]
PACKAGES = {
    "stagerun": "torch",
    "Lightning": "lightning torch torchdata",
    "Accelerate": "accelerate torch torchdata",
    "Composer": "mosaicml torch",
}


def peers(environments: Path) -> list[Peer]:
    def peer(name: str, **lacks: str) -> Peer:
        return Peer(name, environments / name.lower() / "bin" / "python", f"on_{name.lower()}.py", lacks)

    gpus = "several processes of `train.py` need GPUs"
    one = "`fit` on torch runs in one process"
    return [
        Peer("stagerun", Path(sys.executable), "on_stagerun.py", {}),
        peer("Lightning"),
        peer("Accelerate", nan="the loop is its user's"),
        peer("Composer", plateau="no scheduler that follows a metric", best="no checkpoint of the best epoch"),
        peer("Keras", processes=one, uneven=one),
        peer("timm", processes=gpus, uneven=gpus, patience="no early stopping"),
    ]


@cache
def versions(name: str, python: Path) -> str:
    code = (
        "import sys; from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in sys.argv[1:]))"
    )
    packages = PACKAGES.get(name, f"{name.lower()} torch").split()
    return (
        subprocess.run([python, "-c", code, *packages], capture_output=True, text=True).stdout.strip()
        if python.exists()
        else ""
    )


def verdict(peer: Peer, name: str, folder: Path) -> str:
    if not versions(peer.name, peer.python):
        return "not installed"
    if name in peer.lacks:
        return "not offered"
    try:
        return TABLE[name][2](partial(Trial, peer, folder / "trial"))
    except Invalid as e:
        return f"invalid ({e})"


def run(known: list[Peer], names: list[str], work: Path) -> None:
    kept = work / "results.json"
    for peer in known:
        for name in names:
            begun = time.monotonic()
            said = verdict(peer, name, work / peer.name / name)
            results: Results = json.loads(kept.read_text()) if kept.exists() else {}
            results.setdefault(peer.name, {}).update({name: said, "versions": versions(peer.name, peer.python)})
            kept.write_text(json.dumps(results, indent=1))
            print(f"{peer.name:12} {name:16} {said}  [{time.monotonic() - begun:.0f} s]", flush=True)


def write(known: list[Peer], results: Results) -> None:
    """Put the table into RESULTS.md; the prose around it stays."""
    names = [peer.name for peer in known if peer.name in results]
    rows: list[list[Any]] = [["", "situation", "report", *names], ["---"] * (3 + len(names))]
    for name, (words, path, _) in TABLE.items():
        *_, repository, _, number = path.split("/")
        said = [results[peer].get(name, "not run") for peer in names]
        rows.append([f"`{name}`", words, f"[{repository}#{number}](https://github.com/{path})", *said])
    lacks = [f"`{name}` on {peer.name}: {why}" for peer in known for name, why in peer.lacks.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "Versions: " + "; ".join(f"{name}: {results[name]['versions']}" for name in names) + "."]
    lines += ["", "Not offered: " + "; ".join(lacks) + "."]
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/dev trials", description=__doc__)
    parser.add_argument(
        "--environments", type=Path, required=True, help="folder with one virtual environment per trainer"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for runs; results.json there is added to")
    parser.add_argument("--trainers", help="names, with commas")
    parser.add_argument("--situations", help="names, with commas")
    parser.add_argument("--write", action="store_true", help="only write the table of RESULTS.md from results.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    known = peers(options.environments)
    if options.write:
        return write(known, json.loads((options.work / "results.json").read_text()))
    chosen = [peer for peer in known if peer.name in (options.trainers or peer.name).split(",")]
    run(chosen, options.situations.split(",") if options.situations else list(TABLE), options.work)
    return None


if __name__ == "__main__":
    sys.exit(main())
