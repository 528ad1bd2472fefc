"""How many examples hypothesis draws: all of them with the whole suite, a fifth in the quick run, which draws others each time."""

from typing import Any

from hypothesis import settings

FEWER = 5
quick = False  # set before any test is collected


def examples(count: int, **more: Any) -> settings:
    return settings(max_examples=max(10, count // FEWER) if quick else count, **more)
