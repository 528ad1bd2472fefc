"""How well others' systems scaled, as they published it. A literal table; `bench scaling` shows it beside what was measured here."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """`workers`: machines or GPUs, as `unit` says. `efficiency`: speed over `workers` times the speed of one, 1.0 where each does as much
    as alone. The work of each worker is the same for any number of them (weak scaling), or not told."""

    system: str
    network: str
    workers: int
    unit: str
    efficiency: float
    images_per_second: float | None
    source: str


PUBLISHED = (
    Published("MXNet", "Inception-BN-28-small", 2, "GTX 980", 0.97, 1640, "apache/mxnet@31f26bba76"),
    Published("MXNet", "Inception-BN-28-small", 4, "GTX 980", 0.87, 2943, "apache/mxnet@31f26bba76"),
    Published("MXNet", "ResNet-152", 64, "GPUs of EC2 P2", 0.92, 1179.86, "apache/mxnet, example/image-classification"),
    Published(
        "MXNet", "ResNet-152", 256, "GPUs of EC2 P2", 0.90, 4630.42, "apache/mxnet, example/image-classification"
    ),
    Published(
        "MXNet", "Inception-v3", 256, "GPUs of EC2 P2", 0.86, 6660.98, "apache/mxnet, example/image-classification"
    ),
    Published("MXNet", "AlexNet", 256, "GPUs of EC2 P2", 0.53, 61938.36, "apache/mxnet, example/image-classification"),
    Published("Intel Caffe (Dell)", "ResNet-50", 128, "nodes", 0.90, None, "Dell HPC note, March 2018"),
    Published("Intel Caffe (Dell)", "ResNet-50", 256, "nodes", 0.83, None, "Dell HPC note, March 2018"),
    Published("Intel Caffe (Dell)", "ResNet-50", 314, "nodes", 0.76, None, "Dell HPC note, March 2018"),
    Published("TensorFlow + Horovod", "ResNet-50", 256, "nodes", 0.81, 16400, "README of the 24K-batch run"),
    Published("Horovod", "Inception-v3, ResNet-101", 512, "GPUs", 0.90, None, "Horovod's documentation"),
    Published("Horovod", "VGG-16", 512, "GPUs", 0.68, None, "Horovod's documentation"),
)
