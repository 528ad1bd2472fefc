"""The device, its arithmetic, and the environment on which the bits depend."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from stagerun.base.errors import UsageError
from stagerun.base.recipe import IGNORED, Determinism, Precision
from stagerun.system.host import arithmetic
from stagerun.system.portable import is_pinned
from stagerun.system.world import World


def choose_device(world: World, exact: bool = False) -> torch.device:
    """Return the GPU of this local rank, or the CPU without GPUs. `exact`: training has the same bits after a resume; else cuDNN searches
    for the fastest algorithm. UsageError with fewer GPUs than workers on this node."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() < world.local_size:
        raise UsageError(
            f"{world.local_size} workers on this node, which has {torch.cuda.device_count()} GPUs for them",
            "start one worker per GPU (LOCAL_WORLD_SIZE on each node); under srun leave out --gpus-per-task and --gpu-bind, so "
            "that each worker sees all GPUs of its node; an empty CUDA_VISIBLE_DEVICES= trains on the CPU",
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    if exact:
        be_deterministic()
    else:
        torch.backends.cudnn.benchmark = True
    return device


def be_deterministic() -> None:
    """Make cuDNN and cuBLAS use the same algorithm each time. An operation without a deterministic one is used, with torch's warning."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # writes NaN into each new tensor


def environment(device: torch.device, workers: int, reducer: str) -> dict[str, str]:
    """Return the facts on which a run's bits depend besides the recipe. Stored in snapshots, compared on resume."""
    # Of torch's loops (ATEN_CPU_CAPABILITY lowers it), and the limit of oneDNN, which convolves.
    instructions = torch.backends.cpu.get_cpu_capability()
    if most := os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA"):
        instructions += f", oneDNN at most {most.upper()}"
    described = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "instruction set": instructions,
        **arithmetic(),
        "threads": str(torch.get_num_threads()),
        "workers": str(workers),
        "reducer": reducer,
    }
    if device.type == "cuda":
        described["cudnn"] = str(torch.backends.cudnn.version())
        described["tf32"] = f"matmul {torch.backends.cuda.matmul.allow_tf32}, cudnn {torch.backends.cudnn.allow_tf32}"
        described["deterministic"] = (
            f"cudnn {torch.backends.cudnn.deterministic}, benchmark {torch.backends.cudnn.benchmark}, "
            f"algorithms {torch.are_deterministic_algorithms_enabled()}"
        )
    return described


def differences(before: dict[str, str], now: dict[str, str], determinism: Determinism) -> list[str]:
    """Return the reasons why a resumed run may have other bits, a sentence each; none: BIT-EXACT.

    A library that only some stages need (`STAGE_LIBRARIES`) is compared if both record it. A fact that an older snapshot didn't record, or
    one side couldn't read, is unknown."""
    ignored = STAGE_LIBRARIES - (before.keys() & now.keys()) | IGNORED[determinism]
    names = sorted((before.keys() | now.keys()) - ignored)
    since = [n for n in names if n in RECORDED_SINCE and n not in before]
    pairs = {n: (before.get(n, "none"), now.get(n, "none")) for n in names if n not in since}
    if "unknown" in pairs.get("processor", ()):
        pairs.pop("processor flags", None)  # which come from the same place
    same_flags = len(set(pairs.get("processor flags", ("", "none")))) == 1
    reasons = []
    for name, (old, new) in pairs.items():
        if old == new != "unknown":
            continue
        reason = f"{name}: {old} -> {new}"
        if name == "processor flags":
            reason = f"{name}: {flags_apart(old, new)}"
        elif name == "processor" and same_flags:
            reason += ", with the same flags, but libraries look at the model, too"
        reasons.append(reason)
    if since:
        reasons.append(f"{', '.join(since)}: unknown, made by a stagerun that didn't record that")
    return reasons


STAGE_LIBRARIES = {"colour library", "numpy"}  # recorded by stages that change colours, or transform images in Python
RECORDED_SINCE = {"processor", "processor flags", "math settings"}  # the first versions' snapshots lack them


def flags_apart(old: str, new: str) -> str:
    """Return the differences of `processor flags`: `avx512_bf16 missing, amx_tile added`."""
    missing, added = (sorted({*a.split()} - {*b.split(), "none"}) for a, b in ((old, new), (new, old)))
    return ", ".join([*(f"{n} missing" for n in missing), *(f"{n} added" for n in added)])


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the dtype of weights, momentum and images."""
    return torch.float64 if precision is Precision.FP64 else torch.float32


def square_roots_(tensors: tuple[Tensor, ...] | list[Tensor]) -> None:
    """Replace numbers by their square roots; with `determinism: PORTABLE` by numpy, since torch takes MKL's (`system.portable`)."""
    if not is_pinned() or tensors[0].is_cuda:
        torch._foreach_sqrt_(tensors)
        return
    for tensor in tensors:
        np.sqrt(tensor.numpy(), out=tensor.numpy())


def seed(value: int, device: torch.device) -> None:
    """Seed the generators of a forward pass on `device`, 0 <= value < 2^63.

    Not torch.manual_seed: without a GPU that formats a stack trace for later, at a tenth of a millisecond per call."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's queued work, so that a clock read next shows its time. Not for the streams of collectives: a hanging one must be
    waited for where this rank shows as waiting for the others (`TorchComm`)."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def moment(device: torch.device) -> Callable[[], float]:
    """Return a function that returns CLOCK_MONOTONIC when `device` has finished its queued work. It waits for a GPU."""
    if device.type != "cuda":
        now = time.monotonic()
        return lambda: now
    event = torch.cuda.current_stream(device).record_event()

    def reached() -> float:
        event.synchronize()
        return time.monotonic()

    return reached


def to_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Copy from the host to a GPU without waiting, neither for the copy nor for the GPU's queued work."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and host.is_cpu else host.to(device)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager:
    """Return a context for bfloat16 in forward (and so backward) with BF16; else an empty one."""
    if precision is Precision.BF16:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
