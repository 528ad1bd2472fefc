"""Batches one ahead of the GPU. The copying itself needs a GPU: scripts/gpu-check runs it."""

import threading
from collections.abc import Iterator

import pytest
import torch
from engine_help import dataset

from stagerun.engine.feed import Ahead, feed


def test_items_come_in_order_and_one_is_made_ahead() -> None:
    made: list[int] = []
    ahead_of_use = threading.Event()

    def source() -> Iterator[int]:
        for i in range(5):
            made.append(i)
            if i == 1:
                ahead_of_use.set()
            yield i

    with Ahead(source()) as ahead:
        assert next(ahead) == 0
        assert ahead_of_use.wait(10), "the next is made while this one is used"
        assert list(ahead) == [1, 2, 3, 4]
    assert made == [0, 1, 2, 3, 4]


def test_an_error_comes_with_the_item_it_belongs_to() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    with Ahead(source()) as ahead:
        assert next(ahead) == 1
        with pytest.raises(OSError, match="gone"):
            next(ahead)


def test_leaving_early_ends_the_thread() -> None:
    with Ahead(iter(range(10))) as ahead:
        next(ahead)
    assert not [t for t in threading.enumerate() if t.name.startswith("feed")]


def test_the_cpu_is_fed_directly() -> None:
    batches = iter([dataset(4), dataset(2)])
    with feed(batches, torch.device("cpu")) as fed:
        assert fed is batches
