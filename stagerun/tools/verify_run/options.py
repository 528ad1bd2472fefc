"""The options of `stagerun verify-run`."""

from dataclasses import dataclass, replace
from pathlib import Path

from stagerun.command.options import arguments, option
from stagerun.command.shared import Folder, Json, Out, Overrides, TrustCode
from stagerun.tools.verify_run.stretches import Leg


@dataclass(frozen=True, slots=True)
class VerifyRunOptions:
    folder: Folder
    overrides: Overrides = ()
    out: Out = None
    iterations: int = option(
        "--iterations N", "Proofs that are checked by training up to them again.", least=0, default=20
    )
    seed: int = option("--seed N", "Draws them.", default=1)
    nproc: int | None = option("--nproc N", "Workers.  [default: as many as in the run]", least=1)
    threads: int | None = option("--threads N", "Threads per worker.  [default: as many as in the run]", least=1)
    as_json: Json = False
    trust_code: TrustCode = False
    # Set in the processes of a stretch alone.
    stretch: str | None = option("--stretch", "STAGE@ITER@RETURNS@LATEST: a leg that is trained.", hidden=True)

    def stretch_arguments(self, folder: Path, out: Path, stage: str, leg: Leg) -> list[str]:
        """The command line of a leg, and of each of its workers."""
        its = replace(self, folder=str(folder), out=str(out), nproc=leg.workers, threads=leg.threads)
        named = arguments(its, "folder", "overrides", "out", "nproc", "threads", "trust_code")
        return ["verify-run", *named, "--stretch", f"{stage}@{leg.until}@{leg.returns}@{leg.latest}"]
