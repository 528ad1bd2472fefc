"""The published recipes in solvers/: lengths, batches, decay and every learning rate, from their formulas alone; and headers of all files.
What else a schedule sets is in golden/canonical."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stagerun.language import load
from stagerun.schedule import make_knobs

SOLVERS = Path(__file__).parents[2] / "solvers"
GALLERY = sorted(path.name for path in SOLVERS.iterdir())
IMAGENET = 1_281_167

Rate = Callable[[int], float]


# -- the published formulas; `i` is the number of updates done


def poly(base: float, length: int, power: int) -> Rate:
    """Caffe's poly, and SURFsara's poly_cyc with its lr_iter as length."""
    return lambda i: base * (1 - i / length) ** power


def warmed(base: float, start: float, warm: int, after: Rate) -> Rate:
    """SURFsara's warm-up: the policy after it is read at the absolute iteration."""
    return lambda i: (i * base + (warm - i) * start) / warm if i < warm else after(i)


def steps(base: float, *at: int) -> Rate:
    return lambda i: base / 10 ** sum(i >= s for s in at)


def constant(base: float) -> Rate:
    return lambda i: base


def line(i: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return y0 + (y1 - y0) * (i - x0) / (x1 - x0)


def cifar10_fast(epochs: int) -> Rate:
    """PiecewiseLinear([0, 5, E], [0, 0.4, 0]) of (step / 97), the step counted first: cifar10-fast's."""

    def rate(i: int) -> float:
        epoch = (i + 1) / 97
        return line(epoch, 0, 0, 5, 0.4) if epoch <= 5 else line(epoch, 5, 0.4, epochs, 0)

    return rate


def ffcv(epochs: int) -> Rate:
    def rate(i: int) -> float:
        epoch = i * 4096 / IMAGENET
        return line(epoch, 0, 1e-4 * 1.7, 2, 1.7) if epoch <= 2 else line(epoch, 2, 1.7, epochs, 0)

    return rate


def imagenet18_warm_up(i: int) -> float:
    """lr to 2 lr over epochs 0 to 6, with the number of the batch counted from 1."""
    return line((i + 1) * 8192 / IMAGENET, 0, 1.88, 6, 2 * 1.88)


def batch_24k(i: int) -> float:
    return line(i, 0, 0.1, 260, 4.8) if i < 260 else line(i, 260, 4.8, 4680, 0)


# Of arXiv:1911.08250's released code, without Random-k and Threshold-v, which it trains for longer.
BRIEF = ("dense", *(name + scope for name in ("top_k", "terngrad", "qsgd") for scope in ("", "_whole")))
LONG = tuple(name + scope for name in ("random_k", "threshold") for scope in ("", "_whole"))


# Stage: (updates, images per update, images per device batch, weight decay, rate).
Row = tuple[int, int, int, float, Rate]
RECIPES: dict[str, dict[str, Row]] = {
    "resnet50_72ep": {
        "init": (7800, 4096, 32, 5e-5, warmed(1.6, 0.1, 1560, poly(1.6, 18720, 1))),
        "cyc1": (3750, 4096, 32, 5e-5, poly(1.02, 7500, 2)),
        "cyc2": (4750, 4096, 32, 5e-5, warmed(0.764, 0.255, 1000, poly(0.764, 7500, 2))),
        "cyc3": (4750, 4096, 32, 5e-5, warmed(0.572, 0.19, 1000, poly(0.572, 7500, 2))),
        "collapse": (1560, 4096, 32, 2e-4, poly(0.143, 1560, 2)),
    },
    "resnet50_448nodes": {
        "main": (8040, 14336, 16, 5e-5, warmed(4.8, 0.1, 446, poly(4.8, 8040, 1))),
        "collapse": (402, 14336, 16, 1e-4, poly(0.254, 402, 2)),
    },
    "resnet50_8nodes": {"main": (112600, 1024, 32, 1e-4, steps(0.4, 37440, 74880, 99840))},
    "resnet50_16nodes": {"main": (56300, 2048, 32, 1e-4, warmed(0.8, 0.1, 3125, steps(0.8, 18750, 37500, 50000)))},
    "resnet50_64nodes": {"main": (14075, 8192, 32, 1e-4, warmed(3.2, 0.1, 780, steps(3.2, 4680, 9360, 12480)))},
    "resnet50_24k_90ep": {"main": (4680, 24576, 48, 5e-5, batch_24k)},
    "cifar10_resnet9_24ep": {"main": (24 * 97, 512, 512, 5e-4, cifar10_fast(24))},
    "cifar10_alexnet": {"main": (24 * 97, 1024, 512, 5e-4, cifar10_fast(24))},
    "cifar10_resnet9_compressed": {
        **{f"ep24_{name}": (24 * 97, 1024, 512, 5e-4, cifar10_fast(24)) for name in BRIEF},
        **{f"ep40_{name}": (40 * 97, 1024, 512, 5e-4, cifar10_fast(40)) for name in LONG},
    },
    "cifar10_inception_bn_28": {"main": (40 * (60000 // 256 // 5), 1280, 128, 1e-5, constant(0.4))},
    "ilsvrc12_inception_bn": {"main": (30 * (IMAGENET // 144 // 10), 1440, 36, 1e-5, constant(0.05))},
    "imagenet_18min": {
        "px128_bs64": (938, 8192, 64, 1e-4, imagenet18_warm_up),
        "px128_bs128": (782, 16384, 128, 1e-4, constant(2 * 1.88)),
        "px224_bs64": (469, 8192, 64, 1e-4, constant(1.88)),
        "px224_bs192": (938, 24576, 192, 1e-4, steps(0.3 * 1.88, round(12 * IMAGENET / 24576))),
        "px288_bs128": (1017, 16384, 128, 1e-4, steps(0.02 * 1.88, round(IMAGENET / 16384))),
    },
    "resnet50_ffcv_16ep": {"main": (5005, 4096, 512, 1e-4, ffcv(16))},
    "resnet50_ffcv_88ep": {"main": (27525, 4096, 512, 1e-4, ffcv(88))},
}


@pytest.mark.parametrize("name", RECIPES)
def test_lengths_batches_decay_and_the_rate_of_every_iteration(name):
    solvers = {stage.name: stage.solver for stage in load(SOLVERS / name).stages}
    found = {n: (s.max_iter, s.batch_size, s.device_batch_size, s.weight_decay) for n, s in solvers.items()}
    assert found == {stage: row[:4] for stage, row in RECIPES[name].items()}
    for stage, (length, *_, rate) in RECIPES[name].items():
        knobs = make_knobs(solvers[stage])
        worst = max(abs(knobs(i).lr - rate(i)) for i in range(length))
        assert worst <= 1e-12, (stage, worst)


# -- headers

LABELS = ("command", "hardware", "time", "accuracy", "source")


def header(path: Path) -> dict[str, str]:
    """The labelled lines that a file begins with."""
    lines = path.read_text().splitlines()
    assert lines[0] == "# proto-file: protos/stagerun.proto"
    found = {}
    for line in lines:
        if not line.startswith("#"):
            break
        label, _, text = line[1:].strip().partition(" ")
        if label in LABELS and line.startswith("#   " + label):
            found[label] = text.strip()
    return found


@pytest.mark.parametrize("name", GALLERY)
def test_every_file_says_command_hardware_time_accuracy_and_source(name):
    for path in sorted((SOLVERS / name).glob("*.prototxt")):
        found = header(path)
        # What a stage of our own trains to stands with the schedule.
        needed = LABELS if path.name == "schedule.prototxt" or not name.startswith("fashion") else LABELS[:3]
        assert set(found) >= set(needed) and all(found.values()), path
        assert found["command"].startswith(("stagerun run solvers/" + name, "scripts/quickstart")), path
        assert "verified" not in path.read_text(), path
