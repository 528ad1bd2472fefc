"""torchvision, imported so that it works beside a torch build that its wheel was not made for."""

import importlib
import sys
from types import ModuleType

import torch


def torchvision_models() -> ModuleType:
    """`torchvision.models`."""
    return torchvision_part("torchvision.models")


def torchvision_part(module: str) -> ModuleType:
    """A module of torchvision, by its dotted name.

    Beside a CPU build of torch the extension in PyPI's wheel does not load, and the import fails where a Python file registers a fake for
    the operator `torchvision::nms`. That one error is answered by defining the operators, which neither models nor transforms need, and
    importing again. Defining them first would break a matching pair, which defines them itself.
    """
    try:
        return importlib.import_module(module)
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    for name in [m for m in sys.modules if m == "torchvision" or m.startswith("torchvision.")]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module(module)
