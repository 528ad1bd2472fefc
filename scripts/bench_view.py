"""What the page of `stagerun view` costs: time and memory until it is open, milliseconds of a drawing, from a saved file to the new page, and
the share of a core while nothing happens and while a run goes on.

scripts/bench view [WHAT...]    draw open save idle follow; by default all, which takes five minutes
"""

import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stagerun.base.events import Iterated, RunStarted, StageStarted
from stagerun.drawing.picture import Picture, Unit, make_picture
from stagerun.drawing.scale import make_scale
from stagerun.language import load
from stagerun.store.lock import Lock
from stagerun.tools.view.chart import chart
from stagerun.tools.view.follow import Follower
from stagerun.tools.view.trace import Trace

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("help", "process")]

from bench_editor import seconds  # noqa: E402
from long_log import line, write_log  # noqa: E402
from test_view_run import Page  # noqa: E402

SHOWN = ROOT / "solvers" / "resnet50_72ep"
MINUTE = 60.0
EACH = 0.25  # seconds of an iteration of the run that is followed


def made(folder: Path, stages: int, iterations: int) -> Path:
    """A schedule with so many stages, one after the other, and iterations in all."""
    own = f'lr_policy: "poly" base_lr: 0.1 power: 1 max_iter: {iterations // stages} warmup_iter: 100'
    text = """
name: "long"
model { name: "resnet18" num_classes: 10 }
data { train { source: "/d/train" images: 50000 } val { source: "/d/val" images: 5000 } }
solver { batch_size: 256 device_batch_size: 256 momentum: 0.9 weight_decay: 1e-4 transform_param { crop_size: 28 } }
"""
    text += "".join(f'stage {{ name: "s{n}" solver_param {{ {own} }} }}\n' for n in range(stages))
    folder.mkdir()
    (folder / "schedule.prototxt").write_text(text)
    return folder


def trace(out: Path, picture: Picture, most: int) -> Trace:
    follower = Follower(write_log(out, picture, share=0.7), most)
    return follower.trace("", follower.read(), alive=True)


def drawn(where: Path) -> None:
    def median(work: Callable[[], object]) -> float:
        taken = []
        for _ in range(30):
            began = time.perf_counter()
            work()
            taken.append(1000 * (time.perf_counter() - began))
        return statistics.median(taken)

    long = make_picture(load(made(where / "forty", 40, 200_000)))
    for name, picture in ((SHOWN.name, make_picture(load(SHOWN))), ("200,000 iterations in 40 stages", long)):
        one = trace(where / name.replace("/", "-"), picture, 900)
        scale = make_scale(picture)
        plan = median(lambda picture=picture, scale=scale: chart(picture, Unit.EPOCHS, scale))
        run = median(lambda picture=picture, scale=scale, one=one: chart(picture, Unit.EPOCHS, scale, [one]))
        size = len(chart(picture, Unit.EPOCHS, scale, [one])) / 1000
        print(f"draw {name}: {plan:.0f} ms, {run:.0f} ms with a run, {size:.0f} kB")


def opened(where: Path) -> None:
    outs = [where / "one"]
    long = made(where / "long", 40, 200_000)
    write_log(outs[0], make_picture(load(long)))
    measure_open("200,000 iterations in 40 stages", long, outs, where)
    shutil.rmtree(outs[0])
    short = made(where / "short", 5, 20_000)
    outs = [where / f"run{n}" for n in range(100)]
    for n, out in enumerate(outs):
        write_log(out, make_picture(load(short)), seed=n)
    measure_open("100 runs of 20,000 iterations", short, outs, where)
    for out in outs:
        shutil.rmtree(out)
    measure_open(SHOWN.name, SHOWN, [], where)


def measure_open(name: str, folder: Path, outs: list[Path], where: Path) -> None:
    """Until the page is there, and until all logs are read."""
    began = time.perf_counter()
    page = Page(str(folder), *map(str, outs), folder=where)
    html = page.get("")
    there = time.perf_counter() - began
    last, used = began, -1.0
    while (now := seconds(page.process.pid)) != used:  # until it rests
        used, last = now, time.perf_counter()
        time.sleep(2.5)  # the page looks every two seconds
    most = next(s for s in Path(f"/proc/{page.process.pid}/status").read_text().splitlines() if s.startswith("VmHWM"))
    print(
        f"open {name}: {there:.1f} s, {len(html) / 1000:.0f} kB; all is read after {last - began:.1f} s; {used:.1f} s of processor time; "
        f"{int(most.split()[1]) / 1000:.0f} MB"
    )
    done(page)


def done(page: Page) -> None:
    for one in page.open:
        one.close()
    page.end()


def saved(where: Path) -> None:
    """From the end of a write to the event with the new picture."""
    folder = where / "copy"
    shutil.copytree(SHOWN, folder)
    page, taken = Page(str(folder), folder=where), []
    page.until(lambda found: "picture" in found)
    file = folder / "schedule.prototxt"
    text = file.read_text()
    for n in range(23):
        time.sleep(0.7)
        page.sections.clear()
        file.write_text(text.replace('name: "', f'name: "v{n}', 1))
        began = time.perf_counter()
        page.until(lambda found, n=n: f"v{n}" in found.get("picture", ""))
        taken.append(1000 * (time.perf_counter() - began))
    taken = sorted(taken[3:])
    print(f"from save to page, {SHOWN.name}: median {statistics.median(taken):.0f} ms, longest {taken[-1]:.0f} ms")
    done(page)


def share(page: Page, work: Callable[[], None], time_s: float = MINUTE) -> float:
    began, used = time.perf_counter(), seconds(page.process.pid)
    while time.perf_counter() - began < time_s:
        work()
        time.sleep(EACH)
    return (seconds(page.process.pid) - used) / (time.perf_counter() - began)


def idle(where: Path) -> None:
    page = Page(str(SHOWN), folder=where)
    page.until(lambda found: "picture" in found)
    time.sleep(3)
    print(f"idle, with the page open: {100 * share(page, lambda: None):.2f} % of a core")
    done(page)


def followed(where: Path) -> None:
    folder = made(where / "followed", 40, 200_000)
    picture = make_picture(load(folder))
    out = write_log(where / "following", picture, share=0.5)
    with Lock(out), open(out / "log.jsonl", "a") as file:  # as a run holds it
        file.write(line(time.time(), RunStarted(
            schedule=picture.name, out=str(out), workers=1, device="cpu", threads=1, stages=tuple(s.name for s in picture.stages),
            iterations=200_000, iterations_left=100_000, version="0",
        )) + line(time.time(), StageStarted(
            stage="s20", number=21, iter=0, max_iter=5000, start="s19-00005000-a0001", batch_size=256, device_batch_size=256,
        )))  # fmt: skip
        file.flush()
        page = Page(str(folder), str(out), folder=where)
        page.until(lambda found: "loss" in found.get("picture", "") and "running" in found["head"])
        threading.Thread(target=count_drawn, args=(page, drawn := Counter()), daemon=True).start()
        time.sleep(10)
        at = [0]

        def iterate() -> None:
            at[0] += 1
            file.write(line(time.time(), Iterated(
                stage="s20", iter=at[0], epoch=512.0, lr=0.1, momentum=0.9, weight_decay=1e-4, loss=2.0, images=256, seconds=EACH,
            )))  # fmt: skip
            file.flush()

        drawn.clear()
        used = 100 * share(page, iterate, 2 * MINUTE)
    often = ", ".join(f"{name} {drawn[name]} times" for name in ("run", "picture"))
    print(
        f"following a run of 200,000 iterations at its half: {used:.2f} % of a core; drawn anew in two minutes: {often}"
    )
    if not (drawn["run"] and drawn["picture"]):
        sys.exit("the page did not follow the run")
    done(page)


def count_drawn(page: Page, drawn: Counter[str]) -> None:
    """By section, how often the page is sent it anew, until the server goes."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the connection is closed under it
        while said := page.news.readline():
            if said.startswith(b"data: "):
                drawn.update(json.loads(said[6:]).keys())


WORK = {"draw": drawn, "open": opened, "save": saved, "idle": idle, "follow": followed}

if __name__ == "__main__":
    for what in sys.argv[1:] or WORK:
        with tempfile.TemporaryDirectory() as folder:
            WORK[what](Path(folder))
