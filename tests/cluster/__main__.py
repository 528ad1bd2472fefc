"""Hosts by hand:

    python tests/cluster up 3 [--switch user] [--slurm] [--share /tmp/FOLDER] [--tmp-size 64m]
    python tests/cluster exec node1 COMMAND...     in the current folder
    python tests/cluster off node2 | on node2 | cut node2 | heal node2 | shape node2 rate_mbit=10 delay_ms=5
    python tests/cluster ps node1 | quiet | list | down

Two sets of hosts stand side by side under two names: `tests/cluster --name NAME up`, or STAGERUN_CLUSTER=NAME.
"""

import argparse
import os
import sys
from pathlib import Path

# What is imported is the folder above: this one is a package in it.
TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS / "help")]

from cluster import hosts, needed  # noqa: E402


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tests/cluster", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--name", default=os.environ.get("STAGERUN_CLUSTER", "hand"))
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up")
    up.add_argument("count", type=int, nargs="?", default=3)
    up.add_argument("--switch", choices=("bridge", "user"), default="bridge")
    up.add_argument("--slurm", action="store_true")
    up.add_argument("--tmp-size", default="2g")
    up.add_argument("--share", action="append", type=Path, default=[])
    up.add_argument("--loopback-names", action="store_true")
    run = commands.add_parser("exec")
    run.add_argument("host")
    run.add_argument("words", nargs=argparse.REMAINDER)
    for name in ("off", "on", "cut", "heal", "ps", "shape"):
        one = commands.add_parser(name)
        one.add_argument("host")
        if name == "shape":
            one.add_argument("values", nargs="+")
    for name in ("quiet", "list", "down"):
        commands.add_parser(name)
    given = parser.parse_args(words)
    if why := needed.missing():
        parser.error(why)
    folder = Path(f"/tmp/{hosts.FOLDER_PREFIX}{given.name}")
    if given.command == "up":
        cluster = hosts.make(
            given.count, given.switch, folder, kept=True, tmp_size=given.tmp_size, shared=given.share,
            loopback_names=given.loopback_names,
        )  # fmt: skip
        cluster.hostfile()
        print(f"{cluster.hosts} in {folder}")
        if given.slurm:
            from cluster import slurm

            print(f"export SLURM_CONF={slurm.start(cluster).conf}")
        return 0
    if not folder.exists():
        parser.error(f"no hosts named {given.name}; `up` makes some")
    return act(hosts.Cluster.known(folder), given)


def act(cluster: hosts.Cluster, given: argparse.Namespace) -> int:
    match given.command:
        case "exec":
            line = cluster[given.host].words(given.words)
            os.execvp(line[0], line)
        case "off":
            cluster[given.host].power_off()
        case "on":
            cluster[given.host].power_on()
            cluster[given.host].wait_up()
        case "cut":
            cluster[given.host].cut()
        case "heal":
            cluster[given.host].heal()
        case "shape":
            values = dict(word.split("=", 1) for word in given.values)
            cluster[given.host].shape(**{key: float(value) for key, value in values.items()})
        case "ps":
            for pid, line in cluster[given.host].processes().items():
                print(pid, line)
        case "quiet":
            cluster.quiet()
        case "list":
            print(cluster.hosts)
        case "down":
            cluster.down()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
