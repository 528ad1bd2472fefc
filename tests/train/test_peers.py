"""What the collectives' errors are called."""

import pytest
import torch
import torch.distributed as dist
from facade import PeerError, peers

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] "


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer"),
        RuntimeError(PAIR + "Read error [10.0.0.2]:4711: No route to host"),
        RuntimeError(PAIR + "Timed out waiting 1000ms for recv operation to complete"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("Operation timed out!"),
        RuntimeError("Broken pipe"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistStoreError("wait failed"),
    ],
)
def test_a_peer_that_is_gone(error: RuntimeError) -> None:
    words = "lost the other workers while trying to add gradients: "
    with pytest.raises(PeerError, match=words), peers("add gradients"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError(PAIR.replace("pair", "device") + "socket: Too many open files"),
        RuntimeError("Tensors must be contiguous"),
        ValueError("no group"),
    ],
)
def test_an_error_of_this_worker_keeps_its_name(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, peers("add gradients"):
        raise error
    assert caught.value is error
