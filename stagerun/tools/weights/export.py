"""`stagerun export`: a trained network as a file for other programs.

Images in Caffe's LMDBs are B, G, R with values 0..255, and a network is trained on (pixel - mean_value) * scale / std_value, in the
channel_order of its transform. The weights are exported as they are, since folding that into the first convolution is not exact: the product
of a weight and the scale is rounded, and a mean leaves an offset at the border, where padding is zeros. An ONNX graph normalises itself.
"""

import io
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stagerun
from stagerun.base.errors import UsageError, listing
from stagerun.base.recipe import EnsembleRule, Model, Precision, Transform
from stagerun.base.text import size
from stagerun.base.wings import require_wing
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import TrustCode
from stagerun.language.networks import TORCHVISION, known_of
from stagerun.system.files import write_output
from stagerun.tools.weights import Chosen, Ema, Where, choose_one

if TYPE_CHECKING:
    from torch import Tensor

    from stagerun.tools.weights.snapshot import Stored

Floats = tuple[float, ...]

_ENDINGS = (".safetensors", ".pth", ".onnx", ".caffemodel")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    where: Where
    solverstate: str | None = option(
        "--solverstate FILE", "With a .caffemodel: what `caffe train --snapshot` resumes from, to FILE."
    )
    double: bool = flag("--double", "Numbers of 64 bits in Caffe's files, where the snapshot has them.")
    force: bool = flag("--force", "Replace the file if it exists.")
    ema: Ema = False
    trust_code: TrustCode = False
    size: int | None = option("--size N", "Side of the images of a .onnx, in pixels.  [default: crop_size]", least=1)


@command()
def export(snapshot: str = argument("SNAPSHOT|DIR"), file: str = argument("FILE"), *, options: ExportOptions) -> None:
    """Writes a snapshot's network to FILE for other programs, and prints what it expects of images.

    SNAPSHOT is a snapshot's directory, or with --out the name of a snapshot, of a stage (`trunk`; `trunk@best`, `trunk@ema`) or of an
    ensemble; DIR is a schedule's folder or an output folder, with a stage or an ensemble in --stage. The ending of FILE is the format:

    \b
    .safetensors  weights by torchvision's names, and metadata on images and network
    .pth          a state_dict, for torch.load(FILE, weights_only=True)
    .onnx         the graph from bytes to logits, normalisation inside, for any batch;
                  of an ensemble one graph of all its networks
    .caffemodel   weights for Caffe: of nets of Caffe's, and of resnet50,
                  resnet50_intel_caffe, alexnet and vgg16 under their published names

    The networks are trained on (value - mean_value) * scale / std_value of values 0..255, with the channels in the channel_order of their
    transform: B, G, R unless it says RGB. The weights are written as they are: normalise images as is printed. Logits come out; softmax makes
    probabilities of them. An ensemble of probabilities has the logarithms of their mean as logits.
    """
    options = replace(options, ema=options.ema or options.where.means_ema(snapshot))
    paths = [Path(name) for name in (file, options.solverstate) if name is not None]
    _require_sensible(paths, options)
    chosen, schedule = choose_one(snapshot, options.where)
    if len(chosen.folders) > 1 and paths[0].suffix != ".onnx":
        text = f"`{chosen.ensemble}` averages the answers of {len(chosen.folders)} networks, and {paths[0].suffix} holds one"
        raise UsageError(text, f"export .onnx, or one of {listing([folder.name for folder in chosen.folders])}")

    from stagerun.tools.weights.snapshot import open_chosen

    contents, lines = _contents(open_chosen(chosen, schedule, options.trust_code, images=False), chosen, paths, options)
    for path, content in zip(paths, contents, strict=True):
        write_output(path, content)
        lines.insert(0, f"wrote {path}, {size(len(content))}")
    show("\n  ".join(lines))


def _require_sensible(paths: Sequence[Path], options: ExportOptions) -> None:
    """UsageError before anything is read."""
    ending = paths[0].suffix
    if ending not in _ENDINGS:
        raise UsageError(f"{paths[0]}: its ending names no format", f"name a file that ends in {listing(_ENDINGS)}")
    caffes = options.double or options.solverstate
    if (ending != ".onnx" and options.size) or (ending != ".caffemodel" and caffes):
        text = f"--size is for .onnx, --double and --solverstate are for .caffemodel; this is {ending}"
        raise UsageError(text, "leave them out")
    if options.solverstate and options.ema:
        raise UsageError(
            "--solverstate goes with the trained weights, not their averages", "leave --ema or --solverstate out"
        )
    for path in paths:
        if os.path.lexists(path) and (os.path.isdir(path) or not options.force):
            raise UsageError(f"{path} exists already", "name another file; --force replaces a file")


def _contents(
    members: Sequence["Stored"], chosen: Chosen, paths: Sequence[Path], options: ExportOptions
) -> tuple[list[bytes], list[str]]:
    """Return the content of each file, and what their user must know, a line each. UsageError, ResumeRefused."""
    import torch

    from stagerun.tools.weights.snapshot import load_network, saved_weights

    stored, ending = members[0], paths[0].suffix
    model = stored.stage.model
    sides = [_side(one.stage.solver.test_transform, options.size) if ending == ".onnx" else None for one in members]
    each = [_facts(one, options.ema, side) for one, side in zip(members, sides, strict=True)]
    facts = {name: "; ".join(dict.fromkeys(facts[name] for facts in each)) for name in each[0]}
    if chosen.ensemble is not None:
        facts["ensemble"] = chosen.ensemble
    lines = [f"{name}: {facts[name]}" for name in ("input", "before", "output") if facts[name]]
    if (side := sides[0]) is not None:
        return [_onnx(members, chosen.rule, options.ema, side, facts)], lines
    weights = saved_weights(stored, options.ema)
    load_network(stored, torch.device("cpu"), options.ema)  # ResumeRefused for weights of another network
    if ending == ".caffemodel":
        contents = [require_wing("caffe.tensors.caffemodel")(model, weights, options.double, resumable=len(paths) > 1)]
        if len(paths) > 1:
            state = require_wing("caffe.tensors.solverstate")
            contents.append(state(stored.stage, stored.files, stored.ref.iter, str(paths[0]), options.double))
        return contents, lines
    lines.append(f"the network: {_maker(model, chosen.folders[0])}")
    if ending == ".pth":
        buffer = io.BytesIO()
        torch.save(OrderedDict(weights), buffer)
        return [buffer.getvalue()], lines
    from safetensors.torch import save

    return [save(weights, metadata={"format": "pt", **facts})], lines


def _maker(model: Model, folder: Path) -> str:
    """Return the Python that makes the network: a call of torchvision, or the snapshot's."""
    from stagerun.models.catalog import ARGUMENTS

    norm = known_of(model).batch_norm
    as_published = model.channels == 3 and not model.blur_pool and (norm is None or model.eps == norm[1])
    if model.net is None and model.name in TORCHVISION and model.name not in ARGUMENTS and as_published:
        return f"torchvision.models.get_model({model.name!r}, num_classes={model.num_classes})"
    return f"stagerun.Snapshot({str(folder)!r}).model()"


def _side(transform: Transform, side: int | None) -> int:
    """Return the side of an ONNX graph's images."""
    if transform.mean_file is not None:
        text = ".onnx: the graph normalises with a mean for each channel, and this network has a `mean_file`"
        raise UsageError(text, "export .safetensors, and subtract the mean image before")
    side = side or transform.crop_size
    if side is None:
        raise UsageError(".onnx: the evaluation's transform has no crop_size", "give --size N, in pixels")
    return side


def _facts(stored: "Stored", ema: bool, side: int | None) -> dict[str, str]:
    """Return the file's metadata; `side`: of an ONNX graph's images."""
    model, solver = stored.stage.model, stored.stage.solver
    transform = solver.test_transform
    # A graph computes in 32 bits.
    dtype = "float64" if solver.precision is Precision.FP64 and side is None else "float32"
    order = "grey" if model.channels == 1 else transform.channel_order.value
    means, stds = _each(transform.mean_value, 0.0, model), _each(transform.std_value, 1.0, model)
    # (v/255 - mean/255) / (std/(255 scale)) = (v - mean) * scale / std
    mean, std = _list(v / 255 for v in means), _list(v / (255 * transform.scale) for v in stds)
    first = f"less {transform.mean_file}, " if transform.mean_file is not None else ""
    facts = {
        "stagerun": stagerun.__version__,
        "schedule": stored.schedule.name,
        "stage": stored.ref.stage,
        "iter": str(stored.ref.iter),
        "snapshot": stored.ref.name,
        "snapshot_id": stored.ref.id,
        "weights": "averaged" if ema else "trained",
        "model": model.name,
        "num_classes": str(model.num_classes),
        "channel_order": order,
        "mean_value": ", ".join(map(repr, means)),
        "scale": repr(transform.scale),
        "std_value": ", ".join(map(repr, stds)),
        "input": f"{dtype} [N, {model.channels}, H, W], {order}: {first}Normalize(mean={mean}, std={std}) of 0..1",
        "before": _before(transform, side),
        "output": f"logits {dtype} [N, {model.num_classes}]",
    }
    if side is not None:
        facts["input"] = f"uint8 [N, {side}, {side}, {model.channels}], {order}, 0..255; the graph normalises"
    return facts


def _each(values: Floats, default: float, model: Model) -> Floats:
    """Return a value per channel, of a field with one or none for all."""
    return values if len(values) == model.channels else (values or (default,)) * model.channels


def _list(values: Iterable[float]) -> str:
    return f"[{', '.join(f'{v:.9g}' for v in values)}]"


def _before(transform: Transform, side: int | None) -> str:
    """Say what an evaluation does to an image first; '' if nothing."""
    steps = []
    if transform.pad:
        steps.append(f"{transform.pad} pixels of padding ({transform.pad_mode.value}) on each side")
    if (resize := transform.random_resize) is not None:
        steps.append(f"shorter side resized to {resize.min_size} ({resize.interp_mode.value})")
    if transform.rectangular and side is None:
        steps.append(f"a rectangle of about its shape cut from the centre, shorter side {transform.crop_size}")
    elif transform.crop_size is not None:
        crop = side or transform.crop_size
        steps.append(f"{crop} x {crop} cut from the centre")
    return ", ".join(steps)


def _onnx(members: Sequence["Stored"], rule: EnsembleRule, ema: bool, side: int, facts: Mapping[str, str]) -> bytes:
    """Return the graph `images` uint8 [batch, side, side, channels] -> `logits` float32 [batch, classes], for any batch, of an ensemble as in
    `engine.evaluate.together`. UsageError for a network that torch can't export, or that is larger than 2 GiB."""
    import torch

    from stagerun.tools.weights.snapshot import load_network

    class Member(torch.nn.Module):
        def __init__(self, stored: "Stored") -> None:
            super().__init__()
            self.network = load_network(stored, torch.device("cpu"), ema)
            model, transform = stored.stage.model, stored.stage.solver.test_transform
            factors = (transform.scale / std for std in _each(transform.std_value, 1.0, model))
            each = (_each(transform.mean_value, 0.0, model), tuple(factors))
            self.mean, self.factor = (torch.tensor(v, dtype=torch.float32).reshape(1, -1, 1, 1) for v in each)

        def forward(self, x: "Tensor") -> Any:
            return self.network((x - self.mean) * self.factor)

    class Deployed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = torch.nn.ModuleList(map(Member, members))

        def forward(self, images: "Tensor") -> Any:
            x = images.permute(0, 3, 1, 2).to(torch.float32)
            logits = [member(x) for member in self.members]
            if len(logits) == 1:
                return logits[0]
            if rule is EnsembleRule.MEAN_LOGIT:
                return torch.stack(logits).mean(0)
            return torch.stack([z.log_softmax(1) for z in logits]).logsumexp(0) - math.log(len(logits))

    channels = members[0].stage.model.channels
    deployed = Deployed().to("cpu", torch.float32).to(memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    for module in deployed.modules():
        if hasattr(module, "use_module_names"):  # a net of Caffe's
            module.use_module_names()
    # Two images: torch.export takes a dimension of one for a constant.
    example = torch.zeros(2, side, side, channels, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's exporter about torch's exporter
            program = torch.onnx.export(
                deployed,
                (example,),
                None,
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        assert program is not None
        graph = program.model_proto
        inner = graph.graph
        for part in (*inner.node, *inner.value_info, *inner.input, *inner.output, *graph.functions):
            del part.metadata_props[:]  # lines of source files, with their paths on this machine
        for key, value in facts.items():
            graph.metadata_props.add(key=key, value=value)
        content: bytes = graph.SerializeToString(deterministic=True)
        return content
    except ImportError as error:
        raise UsageError(f".onnx needs another package: {error}", "pip install 'stagerun[onnx]'") from error
    except (torch.onnx.OnnxExporterError, ValueError) as error:
        hint = "choose another --size, or export .safetensors"
        raise UsageError(f"torch can't make an ONNX file of this network: {error}", hint) from error
