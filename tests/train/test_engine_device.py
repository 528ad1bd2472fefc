"""What the bits of a resumed run depend on, as far as two environments say it."""

import pytest
import torch
from facade import World

from stagerun.engine import device
from stagerun.engine.device import differences

BEFORE = {"torch": "2.13.0", "workers": "2"}
COLOURS = {"colour library": "torchvision 0.24, pillow 12.0"}


@pytest.mark.parametrize(
    "before, now, elastic, expected",
    [
        (BEFORE, BEFORE, False, []),
        (BEFORE, BEFORE | {"workers": "3"}, False, ["workers: 2 -> 3"]),
        (BEFORE, BEFORE | {"workers": "3"}, True, []),
        (BEFORE, {"workers": "2"}, True, ["torch: 2.13.0 -> none"]),
        # A snapshot of an older stagerun, or of a parent that changes colours; and the other way round.
        (BEFORE | COLOURS, BEFORE, False, []),
        (BEFORE, BEFORE | COLOURS, False, []),
        (BEFORE | COLOURS, BEFORE | {"colour library": "none"}, False, [f"colour library: {COLOURS['colour library']} -> none"]),
    ],
)  # fmt: skip
def test_differences(before: dict[str, str], now: dict[str, str], elastic: bool, expected: list[str]) -> None:
    assert differences(before, now, elastic) == expected


@pytest.mark.parametrize("exact", [True, False])
def test_a_gpu_is_deterministic_where_something_is_trained_on_it(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation has cuDNN search for the fastest way."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    called: list[bool] = []
    monkeypatch.setattr(device, "be_deterministic", lambda: called.append(True))
    assert device.choose_device(World(), exact) == torch.device("cuda", 0)
    assert (bool(called), torch.backends.cudnn.benchmark) == (exact, not exact)
