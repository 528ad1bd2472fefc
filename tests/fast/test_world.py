"""Who a process is, by what its launcher has set: environments as the launchers made them (Open MPI 4.1.4 and 5.0.11, MPICH
4.0.2 and 5.0.2, Slurm 22.05), without what no one reads."""

import pytest
from facade import PeerError, World

from stagerun.system.world import from_environment, launched, rank_said, relayed, started_by

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
def test_the_place_of_a_worker(text: str, place: tuple[int, int, int, int], launcher: str) -> None:
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
def test_a_process_that_is_alone_may_start_workers_itself(text: str) -> None:
    assert not launched(env(text)) and from_environment(env(text)) == World() and started_by(env(text)) == ""


def test_torchrun_is_joined_with_one_worker_too() -> None:
    assert launched(env("RANK=0 WORLD_SIZE=1"))


@pytest.mark.parametrize(
    "text, said",
    [
        ("RANK=2 WORLD_SIZE=2", "RANK=2, WORLD_SIZE=2"),
        ("RANK=zero WORLD_SIZE=2", "RANK must be a whole number, not `zero`"),
        (OPEN_MPI.replace("SIZE=5", "SIZE=many"), "OMPI_COMM_WORLD_SIZE must be a whole number"),
        (OPEN_MPI.replace("LOCAL_RANK=1", "LOCAL_RANK=2"), "local rank 2, 2 on this node"),
        ("PMI_RANK=1 PMI_SIZE=2 PMI_FD=3", "says nothing of its place on this node"),
        (STEP.replace("PER_NODE=2,1", "PER_NODE=2"), "how many tasks this node has"),
        # Exported for all processes alike.
        (f"RANK=0 WORLD_SIZE=3 {STEP}", "srun has started this process as rank 2 of 3"),
        (f"RANK=0 WORLD_SIZE=1 {OPEN_MPI}", "Open MPI's mpirun has started this process as rank 3 of 5"),
    ],
)
def test_contradictions_are_reported(text: str, said: str) -> None:
    with pytest.raises(PeerError, match=said):
        from_environment(env(text))


def test_a_rank_that_is_set_for_all_alike_is_not_who_speaks() -> None:
    assert rank_said(env(f"RANK=0 WORLD_SIZE=3 {STEP}")) == 2 and rank_said(env(f"RANK=0 WORLD_SIZE=1 {OPEN_MPI}")) == 3
    assert rank_said(env(f"RANK=0 WORLD_SIZE=6 {STEP}")) == 0, (
        "a script's, which starts several in each of its processes"
    )


def test_whose_terminal_it_is() -> None:
    """Open MPI gives each rank one, and writes into a file what comes out of it."""
    assert relayed(env(OPEN_MPI.replace("SIZE=5", "SIZE=1").replace("RANK=3", "RANK=0"))) and relayed(env(STEP))
    assert not relayed(env("RANK=1 WORLD_SIZE=4 TORCHELASTIC_RUN_ID=x")) and not relayed(env(BATCH)) and not relayed({})
