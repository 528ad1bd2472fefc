"""A trained network for other programs: safetensors, torch's state_dict, ONNX.

Images in Caffe's LMDBs are B, G, R with values 0..255, and a network is trained on (pixel - mean_value) * scale / std_value, in
the channel_order of its transform. The weights are exported as they are, so whoever uses them must feed them the same; `facts`
of each export say what that is. Into the first convolution only the order of the channels can be folded (`for_rgb`), and
exactly. Scale and mean can't be: the product of a weight and the scale is rounded, and a mean leaves an offset that padding
with zeros doesn't have at the border. Nor need they be, since subtracting and dividing is what preprocessing does anyway. The
ONNX graph does it itself.
"""

import enum
import io
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor, nn

from stagerun.base.errors import UsageError
from stagerun.base.recipe import Transform

LARGEST_ONNX = 2**31 - 2**20  # bytes of weights: a protobuf message ends at 2 GiB


class Format(enum.Enum):
    """The value is the end of the file's name."""

    SAFETENSORS = ".safetensors"
    TORCH = ".pth"
    ONNX = ".onnx"


def for_rgb(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights of a network that was trained on B, G, R, for images in R, G, B. `model` is that network. UsageError for a net of Caffe's
    whose images go into something else than convolutions."""
    if hasattr(model, "first_weights"):  # a net of Caffe's
        first = model.first_weights()  # type: ignore[operator]
        if first is None:
            hint = "export it without --rgb, and give it images in B, G, R"
            raise UsageError(
                "the images go into another layer than a convolution, in which nothing can be turned", hint
            )
    else:
        first = [next(path for path, module in model.named_modules() if isinstance(module, nn.Conv2d)) + ".weight"]
    return {**weights, **{name: weights[name].flip(1).contiguous() for name in first}}


@dataclass(frozen=True, slots=True)
class Pixels:
    """What a network takes: channels in this order (`grey`, `BGR` or `RGB`), each (0..255 - mean) * scale / std, with means and
    stds in that order; `turned` if it was trained on the other one."""

    order: str
    means: tuple[float, ...]
    scale: float
    stds: tuple[float, ...]
    turned: bool

    @property
    def factors(self) -> tuple[float, ...]:
        """What each channel is multiplied by, less its mean."""
        return tuple(self.scale / std for std in self.stds)


def pixels_of(transform: Transform, channels: int, rgb: bool) -> Pixels:
    """With `rgb` those of the network that `for_rgb` makes where it was trained on B, G, R."""
    trained = transform.channel_order.value
    turned = channels == 3 and rgb and trained != "RGB"

    def ordered(values: tuple[float, ...], default: float) -> tuple[float, ...]:
        each = values if len(values) == channels else (values or (default,)) * channels
        return each[::-1] if turned else each

    order = "grey" if channels == 1 else "RGB" if turned else trained
    return Pixels(order, ordered(transform.mean_value, 0.0), transform.scale, ordered(transform.std_value, 1.0), turned)


def to_safetensors(weights: Mapping[str, Tensor], facts: Mapping[str, str]) -> bytes:
    """`facts` are in the file's header."""
    return save(dict(weights), metadata={"format": "pt", **facts})


def to_torch(weights: Mapping[str, Tensor]) -> bytes:
    """What `torch.load(file, weights_only=True)` reads: the state_dict and nothing else, so that it can be loaded as it is."""
    buffer = io.BytesIO()
    torch.save(OrderedDict(weights), buffer)
    return buffer.getvalue()


class Deployed(nn.Module):
    """uint8 [N, H, W, channels] -> logits float32 [N, classes]: the network behind its normalisation."""

    mean: Tensor
    factor: Tensor

    def __init__(self, model: nn.Module, pixels: Pixels) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", _along_channels(pixels.means))
        self.register_buffer("factor", _along_channels(pixels.factors))

    def forward(self, images: Tensor) -> Tensor:
        x = images.permute(0, 3, 1, 2).to(torch.float32)
        return self.model((x - self.mean) * self.factor)


def _along_channels(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)


def to_onnx(network: Deployed, channels: int, side: int, facts: Mapping[str, str]) -> bytes:
    """The graph `images` uint8 [batch, side, side, channels] -> `logits` float32 [batch, classes], any batch.

    Needs onnx and onnxscript. UsageError if the network is too large for one file.
    """
    network = network.to("cpu", torch.float32).to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    for module in network.modules():
        if hasattr(module, "use_module_names"):  # a net of Caffe's
            module.use_module_names()  # type: ignore[operator]
    size = sum(t.numel() * t.element_size() for t in network.state_dict().values())
    if size > LARGEST_ONNX:
        raise UsageError(
            f"the weights take {size / 2**30:.1f} GiB, and an ONNX file holds at most 2", "export with --safetensors"
        )
    # Two images: torch.export takes a dimension of one for a constant.
    example = torch.zeros(2, side, side, channels, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's exporter about torch's own exporter
            program = torch.onnx.export(
                network,
                (example,),
                None,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"torch {torch.__version__} can't make an ONNX graph of this network: {first}",
            "export with --safetensors or --torch; another version of torch or onnxscript may be able to",
        ) from error
    assert program is not None
    graph = program.model_proto
    for part in (*graph.graph.node, *graph.graph.value_info, *graph.graph.input, *graph.graph.output, *graph.functions):
        del part.metadata_props[:]  # lines of source files, with their paths on this machine
    for key, value in facts.items():
        graph.metadata_props.add(key=key, value=value)
    data: bytes = graph.SerializeToString(deterministic=True)
    return data
