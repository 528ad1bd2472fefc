"""Networks without memory: shapes and numbers of parameters, however large they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn


@contextmanager
def on_meta(keep: Callable[[nn.Module], bool] = lambda module: False) -> Iterator[None]:
    """Every layer that is made in here is on the meta device, but those that `keep` wants. RegNets can't be made in `torch.device("meta")`."""
    parameter, buffer = nn.Module.register_parameter, nn.Module.register_buffer

    def register_parameter(self: nn.Module, name: str, value: nn.Parameter | None) -> None:
        if value is not None and not keep(self):
            value = nn.Parameter(value.detach().to("meta"), value.requires_grad)
        parameter(self, name, value)

    def register_buffer(self: nn.Module, name: str, value: Tensor | None, persistent: bool = True) -> None:
        buffer(self, name, value if value is None else value.to("meta"), persistent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "register_parameter", register_parameter)
        patch.setattr(nn.Module, "register_buffer", register_buffer)
        yield
