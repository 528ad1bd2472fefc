"""Public bug reports' situations, tried on stagerun and other trainers: `scripts/dev trials --help`."""

import argparse
import json
import sys
import time
from pathlib import Path

from peers import peers, versions
from situations import TABLE
from trial import Invalid


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/dev trials", description=__doc__)
    parser.add_argument("--environments", type=Path, required=True, help="folder with one virtual environment per trainer")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs; results.json there is added to")
    parser.add_argument("--trainers", help="names, with commas")
    parser.add_argument("--situations", help="names, with commas")
    parser.add_argument("--write", action="store_true", help="writes RESULTS.md from results.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    known = peers(options.environments)
    for peer in known if not options.write else []:
        if options.trainers and peer.name not in options.trainers.split(","):
            continue
        for name in options.situations.split(",") if options.situations else TABLE:
            begun = time.monotonic()
            if not peer.python.exists():
                verdict = "not installed"
            elif name in peer.lacks:
                verdict = "not offered"
            else:
                try:
                    verdict = TABLE[name][2](peer, options.work / peer.name / name)
                except Invalid as e:
                    verdict = f"invalid ({e})"
            results = json.loads(kept.read_text()) if kept.exists() else {}
            results.setdefault(peer.name, {})[name] = verdict
            results[peer.name]["versions"] = versions(peer.name, peer.python)
            kept.write_text(json.dumps(results, indent=1))
            print(f"{peer.name:12} {name:16} {verdict}  [{time.monotonic() - begun:.0f} s]", flush=True)
    if options.write:
        from results import write

        write(results, known)


if __name__ == "__main__":
    sys.exit(main())
