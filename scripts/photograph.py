"""Photographs `stagerun view` in headless Chromium: a mistake, a plan, a running sweep whose worker was killed, a finished tree; wide
and narrow, light and dark. Says what the browser complained about, and ends with 1 if it did.

    scripts/photograph FOLDER             # trains a tree of ten stages on Fashion-MNIST meanwhile: about ten minutes on 2 cores
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SWITCHES = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
SIZES, COLOURS = ((1400, 1000), (800, 1000)), ("light", "dark")
# Three cycles of a trunk, and two collapses off the end of each.
SWEEP = '  from: ["cyc1", "cyc2", "cyc3"]\n  sweep { name: "strong" }\n  sweep { name: "weak" solver { weight_decay: 1e-4 } }'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="gets the pictures, and the tree that is trained")
    folder = parser.parse_args().folder
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sys.exit("photographs need playwright: .venv/bin/pip install playwright")
    if CHROMIUM is None:
        sys.exit("photographs need chromium: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    tree = made(folder)
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SWITCHES)
        with served(folder, "tree") as address:
            urllib.request.urlopen(address).read()  # a version without mistakes
            with edited(tree / "collapse.prototxt", "momentim: 0.9\n"):
                shoot(browser, address, folder / "mistake", complaints)
        with served(folder, str(ROOT / "solvers" / "resnet50_72ep")) as address:
            shoot(browser, address, folder / "plan", complaints)
            shoot(browser, f"{address}#stage=collapse", folder / "stage", complaints)
        with served(folder, "tree") as address:
            for stage in ("cyc1", "collapse_cyc1_weak"):
                killed(folder, stage)
            with trained(folder) as process:
                until(folder, "collapse_cyc3_weak", process)
                shoot(browser, address, folder / "run", complaints)
                process.wait()
            time.sleep(15)  # the page looks again
            shoot(browser, address, folder / "finished", complaints)
        browser.close()
    print("\n".join(complaints) or f"photographs are in {folder}, and the browser has not complained")
    sys.exit(1 if complaints else 0)


def made(folder: Path) -> Path:
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.copytree(ROOT / "solvers" / "fashion_ensemble", tree)
    file = tree / "schedule.prototxt"
    text = (
        file.read_text().replace("../../.data", str(ROOT / ".data")).replace('  from: ["cyc1", "cyc2", "cyc3"]', SWEEP)
    )
    file.write_text(text.replace("snapshot: 300", "snapshot: 100  test_interval: 150  test_iter: 8"))
    return tree


@contextlib.contextmanager
def edited(file: Path, more: str) -> Iterator[None]:
    """With `more` at its end, for a while."""
    text = file.read_text()
    file.write_text(text + more)
    try:
        yield
    finally:
        file.write_text(text)


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Iterator[str]:
    command = [sys.executable, "-m", "stagerun", "view", *words]
    with subprocess.Popen(command, cwd=folder, env=surroundings(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def surroundings() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def trained(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "stagerun", "run", "tree", "--nproc", "2", "--threads", "1"]
    with subprocess.Popen(command, cwd=folder, env=surroundings(), stdout=subprocess.DEVNULL) as process:
        yield process


def until(folder: Path, stage: str, process: subprocess.Popen[bytes]) -> None:
    """Some way into a stage."""
    log = folder / "out" / "fashion_ensemble" / "log.jsonl"
    line = re.compile(rf'"event": "Iterated", "stage": "{stage}", "iter": 1[0-9][0-9],')
    while not (log.exists() and line.search(log.read_text())):
        if process.poll() is not None:
            sys.exit(f"the run has ended with {process.returncode} before {stage}")
        time.sleep(1)


def killed(folder: Path, stage: str) -> None:
    """Loses a worker in a stage."""
    with trained(folder) as process:
        until(folder, stage, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)


def shoot(browser: Any, address: str, file: Path, complaints: list[str]) -> None:
    for width, height in SIZES:
        for colours in COLOURS:
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=colours)
            page.on("console", lambda message: complaints.append(f"{file.name}: {message.text}"))
            page.on("pageerror", lambda error: complaints.append(f"{file.name}: {error}"))
            page.goto(address)
            page.wait_for_timeout(1500)
            page.screenshot(path=f"{file}-{width}-{colours}.png", full_page="#" not in address)
            page.close()


main()
