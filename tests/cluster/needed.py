"""What hosts made of namespaces need of this machine."""

import os
import shutil

# Command: the Debian package that has it.
HOSTS = {
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "srun": "slurm-client", "munged": "munge"}
MPI = {"mpirun.openmpi": "openmpi-bin", "mpiexec.hydra": "mpich"}
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def missing(commands: dict[str, str] = HOSTS) -> str:
    """Why hosts can't be made here, or commands run on them; '' if they can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces and devices"
    packages = {package for command, package in commands.items() if shutil.which(command, path=PATH) is None}
    return f"needs the packages {', '.join(sorted(packages))}; scripts/dev cluster installs them" if packages else ""


def found(command: str) -> str:
    """Its path, in /usr/sbin, too."""
    path = shutil.which(command, path=PATH)
    assert path is not None, f"no {command}"
    return path


def wheel(name: str) -> str | None:
    """The folder of the commands of a newer MPI (openmpi5, mpich5) than Debian has; scripts/dev cluster installs them for as long as
    the tests run, and tells where in STAGERUN_OPENMPI5 and STAGERUN_MPICH5."""
    return os.environ.get(f"STAGERUN_{name.upper()}")
