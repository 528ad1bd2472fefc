"""Settings by which torch computes the same bits on every x86-64 processor with AVX2 and FMA, for `determinism: PORTABLE`.

torch, oneDNN and MKL choose their kernels by the processor when they are loaded; these variables keep each to one choice. MKL's vector
functions (square roots, tangents, logarithms in float64) know no such setting: stagerun takes square roots from numpy, which rounds as
IEEE 754 asks. Learning rates and mixup's weights come from the C library, whose powers, logarithms and sines round otherwise without
FMA.
"""

import os
import sys

from stagerun.base.errors import UsageError
from stagerun.system.host import arithmetic

_PINNED = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}


def is_pinned() -> bool:
    return all(os.environ.get(name) == value for name, value in _PINNED.items())


def pin(threads: int | None) -> None:
    """Set the variables for this process and those that it starts, before torch is loaded. UsageError where bits can't be portable.
    `threads`: that the user asks for."""
    if threads not in (None, 1):
        raise UsageError("`determinism: PORTABLE` has one thread per worker", "leave --threads out, or take ELASTIC")
    if missing := {"avx2", "fma"} - set(arithmetic()["processor flags"].split()):
        lacks = " and ".join(sorted(missing)).upper()
        raise UsageError(f"`determinism: PORTABLE`: this processor lacks {lacks}", "take another machine, or ELASTIC")
    if "torch" in sys.modules and not is_pinned():
        variables = " ".join(f"{name}={value}" for name, value in _PINNED.items())
        raise UsageError(
            "`determinism: PORTABLE`: torch is loaded already, without the settings for it",
            f"start Python with `{variables}`, or import torch after `stagerun.run`",
        )
    # A sum over several threads has another order for another number of them.
    os.environ.update(_PINNED, OMP_NUM_THREADS="1")
