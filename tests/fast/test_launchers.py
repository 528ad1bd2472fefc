"""What a process learns from its launcher: who it is (environments as the launchers made them: Open MPI 4.1.4 and 5.0.11, MPICH 4.0.2 and
5.0.2, Slurm 22.05, without what no one reads), which hosts there are, and where the ranks meet. What is no host: tests/cases/hosts.txt."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from facade import PeerError, UsageError, World

from stagerun.launch import start
from stagerun.launch.options import read_hosts
from stagerun.launch.start import Interface, by_default, job_number, meet, port_of
from stagerun.system.world import expand, from_environment, launched, per_node, rank_said, relayed, started_by

Environment = dict[str, str]


def env(text: str) -> Environment:
    return dict(word.split("=", 1) for word in text.split())


OPEN_MPI = "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=5"
HYDRA = "MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=3 PMI_SIZE=4"
STEP = (
    "SLURM_JOB_ID=1 SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1"
)
# Of the daemon that mpirun had started on the second node of an allocation.
PROXY = (
    "SLURM_JOB_ID=5 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=node2 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
)
BATCH = "SLURM_JOB_ID=6 SLURM_JOB_NODELIST=node[1-2] SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=4 SLURM_PROCID=0"


@pytest.mark.parametrize(
    "text, place, launcher",
    [
        (OPEN_MPI, (3, 5, 1, 2), "Open MPI's mpirun"),
        (f"{OPEN_MPI} {PROXY}", (3, 5, 1, 2), "Open MPI's mpirun"),
        (OPEN_MPI.replace("OMPI_", "MV2_"), (3, 5, 1, 2), "MVAPICH's mpirun"),
        (HYDRA, (3, 4, 1, 2), "mpiexec.hydra"),
        (f"{HYDRA} {STEP}", (3, 4, 1, 2), "mpiexec.hydra"),
        (STEP, (2, 3, 0, 1), "srun"),
        (STEP.replace("NODEID=1", "NODEID=0").replace("PROCID=2", "PROCID=1"), (1, 3, 0, 2), "srun"),
        (f"{STEP} PMI_FD=11 PMI_JOBID=2.0 PMI_RANK=2 PMI_SIZE=3", (2, 3, 0, 1), "srun"),
        (f"{STEP} PMIX_NAMESPACE=slurm.pmix.9.0 PMIX_RANK=2", (2, 3, 0, 1), "srun"),
        ("RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2", (1, 4, 1, 2), "the environment"),
        ("RANK=1 WORLD_SIZE=4", (1, 4, 1, 4), "the environment"),
        # A step within a shell of `srun --pty`, which inherits its variables.
        (f"{STEP} SLURM_PTY_PORT=45127 SLURM_PTY_WIN_COL=80", (2, 3, 0, 1), "srun"),
        # A script that starts two in each task.
        (f"RANK=4 WORLD_SIZE=6 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 {STEP}", (4, 6, 0, 2), "the environment"),
        # torchrun in each task of a step: two tasks, two workers each.
        (
            f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x {STEP}",
            (3, 4, 1, 2),
            "torchrun",
        ),
    ],
)  # fmt: skip
def test_the_place_of_a_worker(text, place, launcher):
    found = from_environment(env(text))
    assert (found.rank, found.size, found.local_rank, found.local_size) == place
    assert found.launcher == launcher == started_by(env(text)) and launched(env(text))
    assert rank_said(env(text)) == place[0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        BATCH,
        f"{BATCH} SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=4",  # salloc's shell, where it is a step
        OPEN_MPI.replace("SIZE=5", "SIZE=1").replace("RANK=3", "RANK=0"),
        "MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_FD=6 PMI_RANK=0 PMI_SIZE=1",
        STEP.replace("TASKS=3", "TASKS=1").replace("PROCID=2", "PROCID=0"),
    ],
    ids=["nothing", "sbatch", "salloc", "mpirun -np 1", "mpiexec -n 1", "srun -n1"],
)
def test_a_process_that_is_alone_may_start_workers_itself(text):
    assert not launched(env(text)) and from_environment(env(text)) == World() and started_by(env(text)) == ""


@pytest.mark.parametrize(
    "text, said",
    [
        ("RANK=2 WORLD_SIZE=2", "RANK=2, WORLD_SIZE=2"),
        ("RANK=zero WORLD_SIZE=2", "RANK must be a whole number, not `zero`"),
        (OPEN_MPI.replace("SIZE=5", "SIZE=many"), "OMPI_COMM_WORLD_SIZE must be a whole number"),
        (OPEN_MPI.replace("LOCAL_RANK=1", "LOCAL_RANK=2"), "local rank 2, 2 on this node"),
        ("PMI_RANK=1 PMI_SIZE=2 PMI_FD=3", "without a local rank"),
        (STEP.replace("PER_NODE=2,1", "PER_NODE=2"), "how many tasks this node has"),
        # Exported for all processes alike.
        (f"RANK=0 WORLD_SIZE=3 {STEP}", "srun has started this process as rank 2 of 3"),
        (f"RANK=0 WORLD_SIZE=1 {OPEN_MPI}", "Open MPI's mpirun has started this process as rank 3 of 5"),
    ],
)
def test_contradictions_are_reported(text, said):
    with pytest.raises(PeerError, match=said):
        from_environment(env(text))


def test_who_speaks_and_whose_terminal_it_is():
    assert launched(env("RANK=0 WORLD_SIZE=1")), "torchrun is joined with one worker, too"
    # A rank that is set for all alike is not who speaks; but a script's is, which starts several in each of its processes.
    assert rank_said(env(f"RANK=0 WORLD_SIZE=3 {STEP}")) == 2 and rank_said(env(f"RANK=0 WORLD_SIZE=1 {OPEN_MPI}")) == 3
    assert rank_said(env(f"RANK=0 WORLD_SIZE=6 {STEP}")) == 0
    # Open MPI gives each rank a terminal, and writes into a file what comes out of it.
    assert relayed(env(OPEN_MPI.replace("SIZE=5", "SIZE=1").replace("RANK=3", "RANK=0"))) and relayed(env(STEP))
    assert not relayed(env("RANK=1 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x")) and not relayed(env(BATCH)) and not relayed({})


# -- hosts


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a\nb\n", [("a", None), ("b", None)]),
        # Open MPI's and DeepSpeed's form, hydra's, and what people write around it.
        ("# two racks\n\na slots=2   # the fast one\n\tb max_slots=4 slots=3\n", [("a", 2), ("b", 3)]),
        ("a max-slots=4", [("a", None)]),
        ("a:2\nb:1\r\n", [("a", 2), ("b", 1)]),
        ("me@node-1.rack_2.org:8", [("me@node-1.rack_2.org", 8)]),
        ("10.0.0.1\n[fe80::1]:2\n", [("10.0.0.1", None), ("[fe80::1]", 2)]),
    ],
)
def test_forms(tmp_path, text, expected):
    hosts = tmp_path / "hosts"
    hosts.write_text(text)
    assert [(host.name, host.slots) for host in read_hosts(str(hosts))] == expected
    assert [(host.name, host.slots) for host in read_hosts("a,b:2, c")] == [("a", None), ("b", 2), ("c", None)]
    hosts.write_bytes(b"\xff\xfe\0")
    with pytest.raises(UsageError, match="not a text file"):
        read_hosts(str(hosts))


# -- Slurm's short forms


@pytest.mark.parametrize(
    "text, names",
    [
        ("node1", "node1"),
        ("node[1-3,7]", "node1 node2 node3 node7"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("a1b[01-03]c", "a1b01c a1b02c a1b03c"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("gpu2,node[3,5-6],login.example.org", "gpu2 node3 node5 node6 login.example.org"),
        ("n[9-10]", "n9 n10"),
        *(
            (text, "")
            for text in ("", "a,,b", "n[1-", "n[1", "n]1[", "n[2-1]", "n[a-b]", "n[]", "n[1-99999999999]", "n[[1]]")
        ),
    ],
)
def test_names(text, names):
    """'': it is none."""
    if names:
        assert expand(text) == names.split()
    else:
        with pytest.raises(ValueError, match="`"):
            expand(text)


@pytest.mark.parametrize(
    "text, tasks", [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), *((text, []) for text in ("", "2(x", "x", "2(x999999999)"))]
)
def test_tasks_per_node(text, tasks):
    if tasks:
        assert per_node(text) == tasks
    else:
        with pytest.raises(ValueError, match="`"):
            per_node(text)


# -- where ranks meet


def test_a_port_that_all_compute_alike():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    others = {**step, "SLURM_STEP_ID": "1"}, {**step, "SLURM_RESTART_COUNT": "1"}
    assert len({job_number(one) for one in (step, *others)}) == 3
    assert 20000 <= port_of(job_number(step)) < 30000 and job_number({"PATH": "/bin"}) == ""


def said(rank: int, size: int, local_size: int, launcher: str, environment: dict[str, str]) -> object:
    world = World(rank=rank, size=size, local_rank=0, local_size=local_size, launcher=launcher)
    return meet(world, environment, patience=5.0)


def test_one_node_needs_no_more_than_the_jobs_number_and_what_is_given_counts():
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "far"}
    first, second = (said(rank, 2, 2, "srun", step) for rank in range(2))
    assert first == second == start.Meeting("127.0.0.1", port_of(job_number(step)), "lo")
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert said(0, 2, 2, "mpiexec.hydra", given) == start.Meeting("127.0.0.1", 29500)


DOCKER, ETH = Interface("docker0", "172.17.0.1"), Interface("eth0", "10.1.0.1")


@pytest.fixture
def misleading(monkeypatch):
    """A host with these two, whose own name leads to its loopback device."""
    here = {"interfaces": lambda: [DOCKER, ETH], "by_default": lambda here: ETH}
    for name, found in {**here, "host_name": lambda: "localhost"}.items():
        monkeypatch.setattr(start, name, found)
    return monkeypatch


def test_rank_0_at_its_own_name_takes_the_interface_of_the_default_route(misleading):
    assert by_default([DOCKER]) == DOCKER and by_default([]) is None
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert said(0, 2, 1, "srun", given) == start.Meeting("localhost", 29500, "eth0")


@pytest.mark.parametrize(
    "launcher, environment, text",
    [
        ("Open MPI's mpirun", {}, "Open MPI's mpirun has started 2 workers, but sets no meeting point"),
        ("mpiexec.hydra", {}, "mpiexec.hydra has started 2 workers, but sets no meeting point"),
        ("srun", {"SLURM_STEP_NODELIST": "n[1-"}, "the node list of this step, `n[1-`, doesn't lead"),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "no.such.host.invalid,b"},
            "the node list of this step, `no.such.host.invalid,b`, doesn't lead",
        ),
        ("the environment", {"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR and MASTER_PORT"),
        ("the environment", {"MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT must be a port number"),
    ],
)
def test_no_place_to_meet_is_reported(launcher, environment, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # it can't be imported
    with pytest.raises(PeerError) as caught:
        said(0, 2, 1, launcher, environment)
    assert text in caught.value.render()


class OfFour:
    """What `mpi4py.MPI` is to four ranks."""

    size = 4

    def Bcast(self, data: bytearray) -> None:
        if data.strip():
            self.said = bytes(data)
        data[:] = self.said


@pytest.mark.parametrize(
    "wanted, name, address, interface",
    [
        ("docker0", "localhost", "172.17.0.1", "docker0"),
        ("", "localhost", "10.1.0.1", "eth0"),
        ("", "172.17.0.1", "172.17.0.1", "docker0"),
    ],
)
def test_under_mpi_rank_0_says_by_mpi4py_where_it_is(wanted, name, address, interface, misleading):
    fake = SimpleNamespace(COMM_WORLD=OfFour(), Init=lambda: None, Finalize=lambda: None)
    mpi4py = ModuleType("mpi4py")
    mpi4py.rc, mpi4py.MPI, mpi4py.__spec__ = SimpleNamespace(), fake, ModuleSpec("mpi4py", None)
    misleading.setitem(sys.modules, "mpi4py", mpi4py)
    misleading.setattr(start, "host_name", lambda: name)
    environment = {"GLOO_SOCKET_IFNAME": wanted} if wanted else {}
    first, other = (said(rank, 4, 2, "Open MPI's mpirun", environment) for rank in (0, 3))
    assert isinstance(first, start.Meeting) and first == other
    assert (first.address, first.interface) == (address, interface) and first.port > 0
    with pytest.raises(PeerError, match="it sees 4 of 6 ranks") as caught:
        said(0, 6, 2, "Open MPI's mpirun", {})
    assert "-x MASTER_ADDR=HOST" in caught.value.hint
