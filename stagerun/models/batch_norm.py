"""BatchNorm whose running statistics are moved from outside, once per iteration: they follow the device batches of all workers, so
that every rank has the same ones, and so does a job with another number of workers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNorm2d(nn.BatchNorm2d):
    """Normalises with the statistics of the device batch and leaves them in `batch_mean` and `batch_var`.

    `batch_mean` [features] and `batch_var` [features] (unbiased, with m/(m-1), as Caffe) are those of the last forward pass
    in training; `running_mean` and `running_var` do not move here, because they follow the mean over all logical
    workers, known only after the reduction. `moving_average_fraction` is Caffe's.
    """

    batch_mean: Tensor
    batch_var: Tensor
    # torch declares these optional, for layers that keep no statistics; ours always does.
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, features: int, moving_average_fraction: float = 0.9, eps: float = 1e-5) -> None:
        super().__init__(features, eps=eps, momentum=None)
        self.moving_average_fraction = moving_average_fraction
        self.register_buffer("batch_mean", torch.zeros(features), persistent=False)
        self.register_buffer("batch_var", torch.zeros(features), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        # Momentum 1 makes torch write the batch's own statistics over the buffers, at no cost beyond the pass itself.
        return F.batch_norm(x, self.batch_mean, self.batch_var, self.weight, self.bias, True, 1.0, self.eps)
