"""Which cores a worker gets: on described machines word for word (tests/golden/topology; `scripts/golden` writes them anew), on many
made-up ones by what must always hold, and what is read from /sys of this or another machine."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stagerun.base.errors import RecipeError, UsageError
from stagerun.launch.placing import make_plan
from stagerun.launch.sharing import Found, choose, default_workers, share
from stagerun.system.cores import Core, Gpu, Machine, Node, ranges, read
from stagerun.tools.topology.command import describe, draw, parse

GOLDEN = Path(__file__).parents[1] / "golden" / "topology"
# Workers, and --comm-cores.
CASES: dict[str, list[tuple[int | None, int | None]]] = {
    "2x24_smt": [(None, None), (3, None), (4, 1), (1, None), (8, None)],
    "2x32_4nodes": [(None, None), (2, None), (3, None), (6, None)],
    "1x4": [(None, None), (2, None), (2, 1), (5, None)],
    "cpuset": [(None, None), (2, None), (3, None)],
    "quota": [(None, None), (2, None)],
    "gpus": [(None, None), (2, None)],
    "gpus_not_told": [(None, None)],
    "hybrid": [(None, None), (2, None)],
}


def machine(name: str) -> Machine:
    return parse((GOLDEN / f"{name}.machine").read_text(), name)


def drawn(name: str) -> str:
    texts = []
    for workers, comm_cores in CASES[name]:
        words = f"--workers-per-node {workers} " * bool(workers) + f"--comm-cores {comm_cores} " * bool(comm_cores)
        texts.append(f"$ stagerun topology {words}--faked {name}.machine\n")
        texts.append(draw(workers, comm_cores, str(GOLDEN / f"{name}.machine"), None, False) + "\n")
    return "".join(texts)


@pytest.mark.parametrize("name", CASES)
def test_picture(name: str) -> None:
    assert drawn(name) == (GOLDEN / f"{name}.txt").read_text(), "run scripts/golden and read the difference"


def test_every_description_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_published_runs() -> None:
    """2 workers on 2 x 24 cores: 22 computing threads and 2 cores for communication each, a socket each."""
    plan = make_plan(machine("2x24_smt"), 2)
    first, second = plan.seats
    assert plan.threads == 22 and plan.idle == 0
    assert (ranges(first.compute), ranges(first.apart), first.memory) == ("0-21", "22-23,70-71", 0)
    assert (ranges(second.compute), ranges(second.apart), second.memory) == ("24-45", "46-47,94-95", 1)


def made_up(draws: random.Random) -> Machine:
    cores, cpu, sockets = [], 0, draws.choice([1, 1, 2, 4])
    smt, nodes_each = draws.choice([1, 1, 2, 4]), draws.choice([1, 1, 2])
    for node in range(sockets * nodes_each):
        size = draws.choice([1, 2, 3, 8, 16, 24])
        for number in range(size):
            slow = sockets == 1 and draws.random() < 0.3 and number > 0
            width = 1 if slow else smt
            cores.append(Core(tuple(range(cpu, cpu + width)), node, node // nodes_each, slow))
            cpu += width
    allowed = frozenset(draws.sample(range(cpu), draws.randint(1, cpu)) if draws.random() < 0.4 else range(cpu))
    gpus = tuple(
        Gpu(n, draws.choice([None, 0, sockets * nodes_each - 1])) for n in range(draws.choice([0, 0, 0, 2, 4]))
    )
    nodes = tuple(Node(n, draws.choice([0, 64 * 10**9, 12979490816])) for n in range(sockets * nodes_each))
    quota = draws.choice([None, None, 0.5, 4.0, 7.5])
    return Machine(tuple(sorted(cores, key=lambda c: (c.node, c.cpus))), nodes, gpus, allowed, quota)


def test_what_always_holds() -> None:
    draws = random.Random(7)
    for _ in range(600):
        holds(made_up(draws), draws)


def holds(found: Machine, draws: random.Random) -> None:
    assert parse(describe(found), "again") == found
    workers = draws.randint(1, len(found.gpus) or 10)
    plan = make_plan(found, workers)
    usable = {cpu: core for core in found.usable for cpu in core.cpus}
    assert bool(plan.seats) or workers > len(found.usable) or found.gpus
    assert plan.why if not plan.seats else [seat.worker for seat in plan.seats] == list(range(workers))
    taken: set[int] = set()
    for seat in plan.seats:
        cpus = seat.compute | seat.apart
        assert seat.compute and seat.apart and cpus <= found.allowed
        # Nobody shares a core, not even its second hardware thread.
        cores = {usable[cpu].cpus for cpu in cpus}
        assert taken.isdisjoint(cpu for core in cores for cpu in core)
        taken |= {cpu for core in cores for cpu in core}
        assert len(cores) == seat.cores or seat.gpu is None
        assert seat.nodes == tuple(sorted({usable[cpu].node for cpu in cpus}))
        assert seat.memory is None or (seat.nodes == (seat.memory,) and len(found.nodes) > 1)
        if not found.gpus:  # a thread for each core, not for each hardware thread
            assert len({usable[cpu].cpus for cpu in seat.compute}) == len(seat.compute) >= plan.threads
        if seat.cores_apart:
            assert seat.compute.isdisjoint(seat.apart)
    assert len({seat.cores for seat in plan.seats}) <= 1
    if plan.seats:
        assert plan.idle == len(found.usable) - sum(seat.cores for seat in plan.seats) >= 0
    cut = [seat for seat in plan.seats if len(seat.nodes) > 1]
    if cut and not found.gpus:
        # Each within a node, half of the cores or more would be idle.
        sizes = [sum(core.node == node.number for core in found.usable) for node in found.nodes]
        inside = max(k for k in range(1, len(usable) + 1) if sum(s // k for s in sizes) >= workers)
        assert 2 * inside * workers <= len(found.usable)


def test_comm_cores_that_leave_nothing_to_compute() -> None:
    with pytest.raises(UsageError, match="--comm-cores 2: each of 2 workers has 2 cores here"):
        make_plan(machine("1x4"), 2, comm_cores=2)
    with pytest.raises(UsageError, match="on a machine with GPUs"):
        make_plan(machine("gpus"), 4, comm_cores=1)
    with pytest.raises(UsageError, match="5 workers on a machine with 4 GPUs"):
        make_plan(machine("gpus"), 5)


def test_more_threads_than_cores_get_the_second_hardware_threads() -> None:
    plan = make_plan(machine("2x24_smt"), 2, threads=44)
    assert plan.threads == 44 and ranges(plan.seats[0].compute) == "0-21,48-69"


def test_all_mistakes_of_a_description() -> None:
    text = (
        "nod 0\nnode 0 socket x\ncores 0-3 siblings 4-6\nnode 1\ncores 3\nquota none\ngpu 1 A\nnode 1\ncores 9-8 fast\n"
    )
    with pytest.raises(RecipeError) as caught:
        parse(text, "m")
    lines = [problem.render().splitlines() for problem in caught.value.problems]
    assert [line[0] for line in lines] == [
        "m:1:1: the GPUs are not numbered 0, 1, 2 ...",
        "m:1:1: no line begins with `nod`",
        "m:2:15: the socket's number must be a whole number, not `x`",
        "m:3:20: 3 siblings of 4 cores",
        "m:5:7: CPU 3 is there twice",
        "m:6:7: `none` is not a number of processors",
        "m:8:6: node 1 is there twice",
        "m:9:7: `9-8` is not a list of CPUs",
    ]
    assert lines[3][1:3] == ["  cores 0-3 siblings 4-6", "                     ^^^"]


# -- what is read


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def tree(root: Path, found: Machine) -> Path:
    """/sys and /proc as the kernel would show such a machine."""
    system = "sys/devices/system"
    put(root, f"{system}/cpu/online", ranges(found.cpus))
    for core in found.cores:
        for cpu in core.cpus:
            put(root, f"{system}/cpu/cpu{cpu}/topology/thread_siblings_list", ranges(core.cpus))
            put(root, f"{system}/cpu/cpu{cpu}/topology/physical_package_id", str(core.socket))
    put(root, f"{system}/node/online", ranges(node.number for node in found.nodes))
    for node in found.nodes:
        here = [cpu for core in found.cores if core.node == node.number for cpu in core.cpus]
        put(root, f"{system}/node/node{node.number}/cpulist", ranges(here))
        put(root, f"{system}/node/node{node.number}/meminfo", f"Node {node.number} MemTotal:  {node.memory // 1024} kB")
    slow = [cpu for core in found.cores if core.slow for cpu in core.cpus]
    if slow:
        put(root, "sys/devices/cpu_atom/cpus", ranges(slow))
    put(root, "proc/self/status", f"Name:\tpython\nCpus_allowed_list:\t{ranges(found.allowed)}")
    for gpu in found.gpus:
        place = f"0000:{16 + gpu.number:02X}:00.0"
        about = f"Model: \t\t {gpu.name}\nGPU UUID:\t GPU-{gpu.number}{gpu.number}aa\nBus Location: \t {place}"
        put(root, f"proc/driver/nvidia/gpus/{place}/information", about)
        put(root, f"sys/bus/pci/devices/{place.lower()}/numa_node", str(-1 if gpu.node is None else gpu.node))
    if found.quota is not None:
        put(root, "proc/self/cgroup", "0::/box/step")
        put(root, "sys/fs/cgroup/box/cpu.max", f"{int(found.quota * 100000)} 100000")
        put(root, "sys/fs/cgroup/box/step/cpu.max", "max 100000")
    return root


@pytest.mark.parametrize("name", CASES)
def test_read(name: str, tmp_path: Path) -> None:
    found = machine(name)
    # The kernel counts in kB.
    found = replace(found, nodes=tuple(Node(n.number, n.memory // 1024 * 1024) for n in found.nodes))
    assert read(tree(tmp_path, found)) == found


def test_quota_of_version_1(tmp_path: Path) -> None:
    tree(tmp_path, machine("1x4"))
    put(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker/12ab")
    put(
        tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000"
    )  # in a container the mount itself is the group
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert read(tmp_path).quota == 2.5
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    assert read(tmp_path).quota is None


@pytest.mark.parametrize(
    "visible, nodes",
    [("2,0", [0, 1]), ("GPU-33", [1]), ("", []), ("-1", []), ("1,9,2", [0]), ("MIG-7f,3", [None, 1])],
)
def test_visible_gpus(visible: str, nodes: list[int | None], tmp_path: Path) -> None:
    found = read(tree(tmp_path, machine("gpus")), {"CUDA_VISIBLE_DEVICES": visible})
    assert [(gpu.number, gpu.node) for gpu in found.gpus] == list(enumerate(nodes))


def test_capacities_tell_slow_cores(tmp_path: Path) -> None:
    tree(tmp_path, machine("1x4"))
    for cpu, capacity in enumerate((1024, 1000, 446, 446)):
        put(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    assert [core.slow for core in read(tmp_path).cores] == [False, False, True, True]


def test_this_machine() -> None:
    found = read()
    assert found.usable and found.allowed <= found.cpus
    assert parse(describe(found), "this") == found


# -- whether, and how many


@pytest.mark.parametrize(
    "name, workers, hosts, environment, bind",
    [
        ("1x4", 2, 1, {}, False),
        ("1x4", 2, 2, {}, True),
        ("1x4", 1, 2, {}, True),
        ("1x4", 5, 2, {}, False),
        ("2x24_smt", 2, 1, {}, True),
        ("2x24_smt", 1, 1, {}, False),
        ("cpuset", 2, 1, {}, True),
        ("quota", 2, 1, {}, False),
        ("quota", 2, 2, {}, False),
        ("1x4", 2, 1, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4"}, True),
        ("1x4", 2, 1, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}, False),
        ("2x24_smt", 2, 2, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "96"}, True),
        ("2x24_smt", 2, 2, {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "48"}, False),  # half of it, or counted in cores
        ("2x24_smt", 2, 2, {"SLURM_JOB_ID": "7"}, False),  # a host that was reached by ssh
        ("2x24_smt", 2, 1, {"PBS_JOBID": "7", "NCPUS": "96"}, True),
        ("2x24_smt", 2, 1, {"LSB_JOBID": "7"}, False),
        ("2x24_smt", 2, 4, {"JOB_ID": "7", "NSLOTS": "96"}, False),  # of all hosts
        ("cpuset", 2, 1, {"LSB_JOBID": "7"}, True),
    ],
)
def test_auto(name: str, workers: int, hosts: int, environment: dict[str, str], bind: bool) -> None:
    assert choose(machine(name), workers, hosts, environment).bind is bind


@pytest.mark.parametrize(
    "name, most, workers",
    [
        ("1x4", None, 1),
        ("2x24_smt", None, 2),
        ("2x24_smt", 1, 1),
        ("2x32_4nodes", None, 4),
        ("2x32_4nodes", 3, 3),
        ("cpuset", None, 1),
        ("quota", None, 1),
        ("gpus", None, 4),
        ("hybrid", None, 1),
    ],
)
def test_default_workers(name: str, most: int | None, workers: int) -> None:
    assert default_workers(machine(name), most) == workers


# -- what the launcher left


def test_workers_that_may_use_the_same_share_it_out() -> None:
    every = tuple(range(96))
    # Ranks of two hosts in turn, as `mpirun --map-by node` gives them.
    ranks = [Found(host, local, every) for local in range(2) for host in ("a", "b")]
    seats = [share(machine("2x24_smt"), ranks, rank, {}).seat for rank in range(4)]
    assert [ranges(seat.compute) for seat in seats if seat] == ["0-21", "0-21", "24-45", "24-45"]


def test_a_worker_that_its_launcher_has_bound_stays_there() -> None:
    """`mpirun --bind-to core` gives each rank a core; `srun --cpu-bind=sockets` a socket."""
    cores = [Found("a", n, (n, n + 48)) for n in range(2)]
    found = [share(machine("2x24_smt"), cores, rank, {}) for rank in range(2)]
    assert [(ranges(f.seat.compute), ranges(f.seat.apart), f.alone) for f in found if f.seat] == [
        ("0", "48", True),
        ("1", "49", True),
    ]
    assert all(f.choice.bind for f in found)
    sockets = [
        Found("a", n, tuple(sorted([*range(24 * n, 24 * n + 24), *range(24 * n + 48, 24 * n + 72)]))) for n in (0, 1)
    ]
    found = [share(machine("2x24_smt"), sockets, rank, {}) for rank in range(2)]
    assert [ranges(f.seat.compute) for f in found if f.seat] == ["0-21", "24-45"] and all(f.choice.bind for f in found)


def test_overlapping_gifts_are_left_alone() -> None:
    ranks = [Found("a", 0, (0, 1, 2)), Found("a", 1, (2, 3))]
    found = share(machine("1x4"), ranks, 0, {})
    assert found.seat is None and not found.choice.bind and "overlap" in found.choice.why


def test_a_quota_is_for_all_workers_of_a_host_together() -> None:
    """2 processors' worth of time, and 4 workers that `mpirun` has given a core each."""
    little = replace(machine("1x4"), quota=2.0)
    found = share(little, [Found("a", n, (n,)) for n in range(4)], 0, {})
    assert not found.choice.bind and found.choice.why.startswith("a quota of 2 processors")
    assert share(little, [Found("a", n, (n,)) for n in range(2)], 0, {}).choice.bind


def test_two_names_of_one_machine() -> None:
    """Containers have names of their own, and the same CPUs, unless somebody has seen to it that they haven't."""
    every = tuple(range(4))
    pods = [Found("a 1f", 0, every, "1f"), Found("b 1f", 0, every, "1f")]
    found = share(machine("1x4"), pods, 0, {})
    assert found.seat is None and not found.choice.bind and "one machine" in found.choice.why
    for apart in (
        [Found("a 1f", 0, every, "1f"), Found("b 2e", 0, every, "2e")],
        [Found("a 1f", 0, every[:2], "1f"), Found("b 1f", 0, every[2:], "1f")],
        [Found("a ", 0, every), Found("b ", 0, every)],
    ):
        assert share(machine("1x4"), apart, 0, {}).choice.bind


def test_gpus_of_which_the_driver_does_not_tell() -> None:
    """torch sees six, /proc/driver four: it isn't known near which cores they are."""
    every = tuple(range(128))
    ranks = [Found("a", n, every) for n in range(6)]
    assert {gpu for rank in range(6) if (s := share(machine("gpus"), ranks, rank, {}).seat) for gpu in [s.gpu]} == {
        None
    }
    assert [s.gpu for rank in range(4) if (s := share(machine("gpus"), ranks[:4], rank, {}).seat)] == [0, 1, 2, 3]


def test_a_description_may_be_long() -> None:
    found = parse("node 0\ncores 0-29999 siblings 30000-59999\n", "m")
    assert len(found.cores) == 30000
    for text in ("node 0\ncores 0-99999999\n", f"node {'9' * 5000}\n", f"node 0\ncores {'0-60000,' * 5000}\n"):
        with pytest.raises(RecipeError):
            parse(text, "m")


if __name__ == "__main__":
    for case in CASES:
        (GOLDEN / f"{case}.txt").write_text(drawn(case))
