"""Time of a training step: stagerun's loop against a hand-written PyTorch loop; below 1, stagerun is faster.

Both train the same network on the same batches, which lie in memory as bytes, with the same settings: SGD with momentum 0.9 and
weight decay, channels_last, one worker; on a GPU both are fed through the same prefetcher, and stagerun alone asks for deterministic
algorithms, as it does when it trains. They take turns in blocks of a few steps. With `--own`, both are stagerun's loop: one trains the network
from a Python file, the other the built-in one. With `--portable`, too, each in a process of its own: one has the settings of
`determinism: PORTABLE`.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from engine_help import Batch
from facade import Arithmetic, Normalise, StageLoop, make_state, recipe, torchvision_models, train
from turns import parser, ratio, spread, turns

from stagerun.base.code import Sources
from stagerun.comm import SoloComm, make_reducer
from stagerun.engine.device import be_deterministic, dtype_of, synchronize
from stagerun.engine.images import feed
from stagerun.models import build
from stagerun.models.small import resnet_small
from stagerun.schedule import make_knobs

LR, MOMENTUM, DECAY, MEAN, SCALE = 0.05, 0.9, 5e-4, 110.0, 1 / 64


@dataclass(frozen=True)
class Case:
    model: recipe.Model
    side: int
    batch: int
    precision: recipe.Precision = recipe.Precision.FP32
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    compiled: bool = False

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision is recipe.Precision.BF16)


CASES = {
    "resnet18": Case(recipe.Model(name="resnet18", num_classes=1000), side=64, batch=32),
    "resnet50": Case(recipe.Model(name="resnet50", num_classes=1000), side=224, batch=16),
    "resnet_small": Case(recipe.Model(name="resnet_small", num_classes=10, channels=1), side=28, batch=64),
}


TORCHVISION = "from torchvision import models\ndef build(num_classes):\n    return models.{}(num_classes=num_classes)\n"
SMALL = """from stagerun.base.recipe import Model
from stagerun.models.small import resnet_small
def build(channels, num_classes):
    return resnet_small(Model(name="resnet_small", num_classes=num_classes, channels=channels))
"""


def from_file(case: Case) -> Case:
    """The same with its network from a file."""
    name = case.model.name
    files = (("mynet.py", SMALL if name == "resnet_small" else TORCHVISION.format(name)),)
    return replace(case, model=replace(case.model, name="mynet.py:build", sources=Sources("own", files)))


def make_batches(case: Case, count: int = 8) -> list[Batch]:
    rng = np.random.default_rng(1)
    shape = (case.batch, case.side, case.side, case.model.channels)
    return [
        Batch(
            rng.integers(0, 256, shape, dtype=np.uint8),
            rng.integers(0, case.model.num_classes, case.batch),
            np.arange(case.batch) + i * case.batch,
        )
        for i in range(count)
    ]


def endless(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def ours(case: Case, batches: list[Batch]) -> Callable[[int], None]:
    """A function that trains so many steps."""
    solver = recipe.Solver(
        base_lr=LR, lr_policy="fixed", max_iter=1 << 40, batch_size=case.batch, device_batch_size=case.batch,
        momentum=MOMENTUM, weight_decay=DECAY, transform=recipe.Transform(mean_value=(MEAN,), scale=SCALE),
        test_batch_size=case.batch, random_seed=1, precision=case.precision, compile=case.compiled,
    )  # fmt: skip
    torch.manual_seed(1)
    state = make_state(build(case.model), solver, case.device)
    dtype = dtype_of(case.precision)
    normalise = Normalise(solver.transform, case.model.channels, case.device, dtype, channels_last=True)
    arithmetic = Arithmetic(
        logical_workers=1, normalise=normalise, precision=solver.precision, clip_gradients=None,
        forward_seed=lambda position: position,
    )  # fmt: skip
    loop = StageLoop(
        stage="bench", max_iter=solver.max_iter, batch_size=solver.batch_size, epoch_images=1 << 20, start_position=0,
        logical_workers=range(1), knobs=make_knobs(solver), snapshot=0, test_interval=0, arithmetic=arithmetic,
    )  # fmt: skip
    reducer = make_reducer(recipe.Determinism.FIXED, [p.tensor for p in state.solver.parameters], SoloComm(), 1)
    events = train(loop, state, fed(case, batches), reducer, lambda: False)

    def steps(count: int) -> None:
        for _ in range(count):
            next(events)

    return steps


def by_hand(case: Case, batches: list[Batch]) -> Callable[[int], None]:
    """The loop that one would write without stagerun: torch's own BatchNorm, optimiser and loss."""
    torch.manual_seed(1)
    if case.model.name == "resnet_small":
        model: torch.nn.Module = with_torchs_norm(resnet_small(case.model))
    else:
        model = getattr(torchvision_models(), case.model.name)(num_classes=case.model.num_classes)
    model = model.to(case.device, memory_format=torch.channels_last).train()
    if case.compiled:
        model.compile()
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    source = fed(case, batches)

    def steps(count: int) -> None:
        for _ in range(count):
            batch = next(source)
            images, labels = (torch.as_tensor(array) for array in (batch.images, batch.labels))
            x = images.permute(0, 3, 1, 2).float().sub_(MEAN).mul_(SCALE)
            with case.autocast():
                logits = model(x)
            loss = F.cross_entropy(logits.float(), labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            loss.item()  # a loop that shows its loss reads it

    return steps


def fed(case: Case, batches: list[Batch]) -> Iterator:
    """Without end; the prefetcher's thread goes with the process."""
    return feed(endless(batches), case.device).__enter__()


def with_torchs_norm(model: torch.nn.Module) -> torch.nn.Module:
    for name, child in model.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            setattr(model, name, torch.nn.BatchNorm2d(child.num_features))
        else:
            with_torchs_norm(child)
    return model


def settle(device: torch.device, ours: bool) -> None:
    """The settings that each side has on a GPU."""
    if device.type == "cuda":
        if ours:
            be_deterministic()
        else:
            torch.use_deterministic_algorithms(False)
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = False, True


def seconds(steps: Callable[[int], None], count: int, device: torch.device) -> tuple[float, float]:
    """The seconds of a step: on the clock, and on this process's processors, which other programs disturb little."""
    synchronize(device)
    started, used = time.perf_counter(), time.process_time()
    steps(count)
    synchronize(device)
    return (time.perf_counter() - started) / count, (time.process_time() - used) / count


PINNED = """
import pathlib, runpy, sys
from stagerun.system import portable
portable.pin(1)
sys.argv = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def compare_portable(name: str, rounds: int, count: int) -> None:
    words = [__file__, "--threads", "1", "--case", name, "--serve"]
    sides = [
        subprocess.Popen(
            [sys.executable, *more, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for more in (["-c", PINNED], [])
    ]
    times: list[list[tuple[float, float]]] = [[], []]

    def block(side: int, steps: int) -> tuple[float, float]:
        print(steps, file=sides[side].stdin)
        clock, cpu = map(float, sides[side].stdout.readline().split())
        return clock, cpu

    for side in (0, 1):
        block(side, 2)
    for side in turns((0, 1), rounds):
        times[side].append(block(side, count))
    for side in sides:
        side.communicate()
    (clock_a, cpu_a), (clock_b, cpu_b) = (tuple(zip(*found, strict=True)) for found in times)
    print(
        f"{name}, 1 thread, {rounds} blocks of {count} steps each, milliseconds: PORTABLE {spread([1000 * t for t in clock_a], 2)}, "
        f"without {spread([1000 * t for t in clock_b], 2)}, ratio {ratio(clock_a, clock_b)}, of processor time {ratio(cpu_a, cpu_b)}"
    )


def compare(case: Case, own: bool, rounds: int, count: int) -> None:
    batches = make_batches(case)
    names = ("from a file", "built in") if own else ("stagerun", "by hand")
    a, b = (
        (ours(from_file(case), batches), ours(case, batches)) if own else (ours(case, batches), by_hand(case, batches))
    )
    times: dict[Callable[[int], None], list[tuple[float, float]]] = {a: [], b: []}
    for steps in times:
        settle(case.device, ours=own or steps is a)
        steps(max(2, count // 4))
    for steps in turns((a, b), rounds):
        settle(case.device, ours=own or steps is a)
        times[steps].append(seconds(steps, count, case.device))
    (clock_a, cpu_a), (clock_b, cpu_b) = (tuple(zip(*found, strict=True)) for found in times.values())
    compiled, each = " compiled" * case.compiled, f"{rounds} blocks of {count} steps each"
    print(
        f"{case.model.name} {case.side}x{case.side} batch {case.batch} {case.precision.value}{compiled} on {case.device}, "
        f"{torch.get_num_threads()} threads, {each}, milliseconds: {names[0]} {spread([1000 * t for t in clock_a], 2)}, "
        f"{names[1]} {spread([1000 * t for t in clock_b], 2)}, ratio {ratio(clock_a, clock_b)}, of processor time "
        f"{ratio(cpu_a, cpu_b)}; {case.batch / statistics.median(clock_a):.4g} images/s"
    )


def main() -> None:
    asked = parser(__doc__, rounds=20)
    asked.add_argument("--case", choices=CASES, nargs="+", default=["resnet18", "resnet_small"])
    asked.add_argument("--seconds", type=float, default=1.5, help="length of a block, about")
    asked.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    asked.add_argument("--device", default="cpu", help="cpu or cuda")
    asked.add_argument("--batch", type=int, default=None)
    asked.add_argument("--compile", action="store_true", help="have torch.compile make both networks' code")
    asked.add_argument("--own", action="store_true", help="a network from a file against the same one built in")
    asked.add_argument(
        "--portable", action="store_true", help="with the settings of PORTABLE against without, one thread"
    )
    asked.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # a side of --portable
    options = asked.parse_args()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    settings = {"precision": recipe.Precision(options.precision.upper()), "compiled": options.compile}
    for name in options.case:
        case = replace(CASES[name], **settings, device=torch.empty(0, device=options.device).device)
        case = replace(case, batch=options.batch or case.batch)
        if options.serve:
            steps = ours(case, make_batches(case))
            for line in sys.stdin:
                print(*seconds(steps, int(line), case.device), flush=True)
            return
        probe = by_hand(case, make_batches(case))
        probe(2)
        count = max(1, round(options.seconds / seconds(probe, 3, case.device)[0]))
        if options.portable:
            compare_portable(name, options.rounds, count)
        else:
            compare(case, options.own, options.rounds, count)


if __name__ == "__main__":
    main()
