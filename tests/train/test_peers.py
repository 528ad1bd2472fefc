"""What the collectives' errors are called."""

import pytest
import torch

from stagerun.base.errors import PeerError
from stagerun.comm.group import peers


def test_a_gpu_out_of_memory_is_not_a_lost_worker() -> None:
    lost = pytest.raises(PeerError, match="lost the other workers while trying to add gradients: Connection closed")
    with lost, peers("add gradients"):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(torch.OutOfMemoryError), peers("add gradients"):
        raise torch.OutOfMemoryError("CUDA out of memory")
