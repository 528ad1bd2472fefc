"""The component `stagerun.run` of TorchX, for Kubernetes and whatever else TorchX queues jobs in.

    torchx run -s kubernetes -cfg queue=QUEUE stagerun.run --image IMAGE --nodes 4 --mounts type=volume,src=CLAIM,dst=/mnt \\
        -- /mnt/solvers/NAME --out /mnt/out/NAME

Needs the extra `torchx`; nothing else imports this module.
"""

import shlex
from typing import List, Optional  # noqa: UP035

from torchx import specs

PORT = 29500


def run(
    *args: str,
    image: str,
    nodes: int = 1,
    workers_per_node: int = 1,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 8192,
    max_retries: int = 10,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045  (TorchX reads these words, and knows no others)
    name: str = "stagerun",
) -> specs.AppDef:
    """`stagerun run` on several nodes, all restarted when one is lost: the run resumes from its newest snapshot. TorchX ignores exit codes and
    restarts a mistake as often: run `stagerun check` first.

    Args:
        args: what follows `run`: the schedule's folder, --out, further options; both folders as the containers see them
        image: container image in which stagerun is installed
        nodes: containers, each perhaps on another node
        workers_per_node: workers in each; with GPUs as many as these
        cpu: processors of each container
        gpu: GPUs of each container
        memMB: memory of each container, in MB
        max_retries: restarts of the job
        mounts: as of TorchX: type=volume,src=CLAIM,dst=/mnt; all containers must see the output folder
        name: of the job
    """
    if not args:
        raise ValueError("which schedule? Write `-- DIR --out FOLDER` at the end")
    if min(nodes, workers_per_node) < 1:
        raise ValueError(f"nodes ({nodes}) and workers_per_node ({workers_per_node}) must be 1 or more")
    if 0 < gpu < workers_per_node:
        raise ValueError(f"workers_per_node ({workers_per_node}) must be {gpu} at most, one per GPU")
    launcher = ["python", "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={workers_per_node}"]
    launcher += [f"--node-rank={specs.macros.replica_id}", "--max-restarts=0"]
    # TorchX substitutes the name of the variable that holds the first container's address; the first one may lack it.
    meeting = f'--master-addr="$${{{specs.macros.rank0_env}:-localhost}}" --master-port={PORT}'
    # `exec`, so that the signal with which a container is ended reaches the launcher, and by it the workers, which save.
    line = f"exec {' '.join(launcher)} {meeting} -m stagerun run {shlex.join(args).replace('$', '$$')}"
    role = specs.Role(
        name="worker",
        image=image,
        entrypoint="bash",
        args=["-c", line],
        env={"OMP_NUM_THREADS": str(max(1, cpu // workers_per_node))},
        num_replicas=nodes,
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.APPLICATION,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
        port_map={"meeting": PORT},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=name, roles=[role])
