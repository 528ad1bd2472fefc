"""OUT/log.jsonl of a run as long as one likes, written in a moment: the stages of a picture, with numbers that look like training."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from facade import Event, Note, chart
from log_help import evaluated, finished, run_started, stage_started


def write_log(
    out: Path,
    picture: chart.Picture,
    *,
    share: float = 1.0,
    tests: int = 12,
    seed: int = 1,
    restarts: int = 0,
    ema: bool = False,
) -> Path:
    """`share` of all iterations is done; `tests` in each stage; `restarts` of the process, evenly."""
    out.mkdir(parents=True, exist_ok=True)
    stages = [stage for stage in picture.stages.values() if stage.enabled]
    count = sum(stage.iterations for stage in stages)
    lives = [round(share * count * n / (restarts + 1)) for n in range(1, restarts + 1)]
    with open(out / "log.jsonl", "w", encoding="utf-8") as file:
        for said in _lines(picture, stages, round(share * count), tests, Random(seed), lives, ema):
            file.write(said)
    return out


def line(time: float, event: Event) -> str:
    return json.dumps({"time": time, "event": type(event).__name__, **asdict(event)}) + "\n"


def _lines(
    picture: chart.Picture, stages: list[chart.StagePicture], left: int, tests: int, random: Random, lives: list[int],
    ema: bool,
) -> Iterator[str]:  # fmt: skip
    names, clock, done = tuple(stage.name for stage in stages), 1e9, 0
    yield line(clock, run_started(schedule=picture.name, stages=names))
    for stage in stages:
        if not left:
            return
        start = f"{stage.parent.name}-{stage.parent_iter:08d}-a0001" if stage.parent else "seed 1"
        batch = int(stage.settings["batch"][0][1])
        begun = stage_started(stage.name, max_iter=stage.iterations, start=start, batch_size=batch)
        yield line(clock, begun)
        rates, at = stage.line(), 0
        every = max(1, stage.iterations // tests) if tests else stage.iterations + 1
        for i in range(1, min(stage.iterations, left) + 1):
            clock += 0.25
            while at + 1 < len(rates) and rates[at + 1][0] <= i - 1:
                at += 1
            epoch = stage.begin + i * stage.each
            fall = math.exp(-epoch / 20)
            loss = 1.2 + 5.5 * fall + 0.15 * random.random() + 8 * rates[at][1] / (1 + epoch)
            yield (
                f'{{"time": {clock!r}, "event": "Iterated", "stage": "{stage.name}", "iter": {i}, "epoch": {epoch!r}, "lr": {rates[at][1]!r}, '
                f'"momentum": 0.9, "weight_decay": 0.0001, "loss": {loss:.4f}, "images": {batch}, "seconds": 0.25, '
                '"update_seconds": 0.01}\n'
            )
            if done + i in lives:
                yield line(clock, Note(text="a worker is slow", warning=True))
                yield line(clock + 9, run_started(schedule=picture.name, stages=names))
                yield line(clock + 9, replace(begun, iter=i))
            if i % every == 0 or i == stage.iterations:
                top1 = 0.78 * (1 - fall) ** 0.5 + 0.01 * random.random() - 0.15 * math.sqrt(rates[at][1] / 20)
                for averaged in (False, True)[: 1 + ema]:
                    yield line(clock, evaluated(stage.name, i, max(0.001, top1) + 0.004 * averaged, ema=averaged))
        if left >= stage.iterations:
            yield line(clock, finished(stage.name, stage.iterations, max(0.001, top1), stage.iterations / 4))
        left -= min(stage.iterations, left)
        done += stage.iterations
