"""What is fast stays so: a test of this folder that imports torch, or starts a process, fails."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROCESSES = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
watching = False


class NoTorch:
    """Other folders' tests may have imported torch in this process: then nothing is seen here. Alone, everything is."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if watching and name in ("torch", "torchvision"):
            pytest.fail(f"a fast test imports {name}: its place is tests/train")


def _no_process(event: str, given: tuple[Any, ...]) -> None:
    if watching and event in PROCESSES:
        pytest.fail("a fast test starts a process: its place is tests/process")


sys.meta_path.insert(0, NoTorch)
sys.addaudithook(_no_process)


def _watched(node: pytest.Item | pytest.Collector) -> Iterator[None]:
    """pytest calls these hooks for other folders' tests, too."""
    global watching
    watching = Path(__file__).parent in node.path.parents
    try:
        return (yield)
    finally:
        watching = False


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    return (yield from _watched(collector))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    return (yield from _watched(item))
