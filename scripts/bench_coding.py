"""What it takes to compress gradients: nanoseconds per number to make a message and to add one up, and its bytes per number.

By each method with its default settings, of a vector of normal numbers, in one thread; the least of several times, since others may use the machine. `stagerun.plan.coding`
has these for `plan --link`, where AUTO hasn't measured the schedule's own tensors on the machine.
"""

import argparse

import torch

from stagerun.base.compression import METHODS, default_memory
from stagerun.base.recipe import Compression, Method
from stagerun.engine.compression import operator
from stagerun.engine.trials import cost_of, lossless_cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=1 << 20)
    parser.add_argument("--times", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    side = int(options.numbers**0.5)
    vector = torch.randn(side * side) * 1e-3
    for method in METHODS:
        if method in (Method.AUTO, Method.LOSSLESS):
            continue
        how = Compression(method=method, memory=default_memory(method, False))
        costs = [cost_of(operator(how, (side, side)), vector) for _ in range(options.times + 1)][1:]
        encode, add = (min(cost[i] for cost in costs) / vector.numel() for i in (1, 2))
        show(method, encode, add, sum(costs[0][0]) / vector.numel())
    costs = [cost for _ in range(options.times) if (cost := lossless_cost([vector])) is not None]
    if costs:
        show(Method.LOSSLESS, *map(min, zip(*costs, strict=True)))


def show(method: Method, encode: float, add: float, size: float) -> None:
    print(f"    Method.{method.value}: Rate({1e9 * encode:.2g}, {1e9 * add:.2g}, {size:.2g}),", flush=True)


if __name__ == "__main__":
    main()
