"""`stagerun export`."""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from stagerun.base.errors import UsageError, listing
from stagerun.base.text import listed, size
from stagerun.command.ending import show
from stagerun.command.options import argument, command, flag, option
from stagerun.command.shared import TrustCode
from stagerun.system.files import write_output
from stagerun.tools.weights.selection import Ema, OutOfName, choose_snapshot, ensemble_of

SUFFIX = {"safetensors": ".safetensors", "torch": ".pth", "onnx": ".onnx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    file: str | None = argument("[FILE]", default=None)
    out: OutOfName = None
    safetensors: bool = flag("--safetensors", "Weights by torchvision's names, and what must be known as metadata.")
    torch: bool = flag("--torch", "A state_dict, for torch.load(FILE, weights_only=True).")
    onnx: bool = flag("--onnx", "The graph from bytes to logits, normalisation inside, for any batch.")
    caffemodel: str | None = option("--caffemodel FILE", "Weights for Caffe and what reads its files, to FILE.")
    solverstate: str | None = option(
        "--solverstate FILE", "With --caffemodel: what `caffe train --snapshot` goes on from, to FILE."
    )
    double: bool = flag("--double", "Numbers of 64 bits in Caffe's files, where the snapshot has them.")
    output: str | None = option(
        "--output FILE", "The same as FILE.  [default: ./SNAPSHOT with .safetensors, .pth or .onnx]"
    )
    force: bool = flag("--force", "Replace the file if it exists.")
    ema: Ema = False
    trust_code: TrustCode = False
    rgb: bool = flag("--rgb", "For images in R, G, B, of a network that was trained on B, G, R.")
    size: int | None = option("--size N", "Side of the images of --onnx, in pixels.  [default: crop_size]", least=1)


@command()
def export(snapshot: str = argument("SNAPSHOT"), *, options: ExportOptions) -> None:
    """Writes a snapshot's network as a file for other programs, and says what it expects of images.

    SNAPSHOT is a snapshot's directory, or its name with --out, or that of a stage, or of an ensemble that averages weights. FILE is what is
    written. The networks are trained on (value - mean_value) * scale / std_value of values 0..255, with the channels in the channel_order
    of their transform: B, G, R unless it says RGB.
    --safetensors and --torch hold the weights as they are; whoever uses them must normalise as is printed. --rgb swaps the
    inputs of the first convolution, which changes nothing else, and nothing at all where the network was trained on R, G, B.
    Logits come out; softmax makes probabilities of them.
    --caffemodel is for nets of Caffe's, and for resnet50, resnet50_intel_caffe, alexnet and vgg16 under their published names.
    """
    snapshot, options = _with_file(snapshot, options)
    folder = choose_snapshot(snapshot, options.out)
    if options.caffemodel is None and options.solverstate is None:
        export_snapshot(folder, options)
    else:
        export_for_caffe(folder, options)


def _with_file(snapshot: str, options: ExportOptions) -> tuple[str, ExportOptions]:
    """FILE as --output, in whichever order the two words are: `--onnx net.onnx SNAPSHOT` looks as if --onnx took it. UsageError."""
    file = options.file
    if file is None:
        return snapshot, options
    if options.output is not None:
        raise UsageError(f"{file}, and --output {options.output}", "name one file")
    if Path(snapshot).suffix in SUFFIX.values() and not os.path.isdir(snapshot):
        snapshot, file = file, snapshot
    return snapshot, replace(options, output=file)


def export_for_caffe(folder: Path, options: ExportOptions) -> None:
    """Both files at once, whole or not at all each."""
    _require_for_caffe(options)
    paths = [Path(file) for file in (options.caffemodel, options.solverstate) if file is not None]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError(f"--caffemodel and --solverstate are both {paths[0]}", "name two files")
    for path in paths:
        _require_free(path, options.force)

    from stagerun.tools.weights import exporting
    from stagerun.tools.weights.stored import Trust, open_snapshot

    stored = open_snapshot(folder, Trust(options.trust_code))
    files, lines = exporting.for_caffe(stored, paths, options.ema, options.rgb, options.double)
    for path, data in zip(paths, files, strict=True):
        _require_free(path, options.force)
        write_output(path, data)
        show(f"wrote {path}, {size(len(data))}")
    show("\n".join(f"  {line}" for line in lines))


def _require_for_caffe(options: ExportOptions) -> None:
    """UsageError for options that say something else, too."""
    others = [f"--{name}" for name in (*SUFFIX, "output", "size") if getattr(options, name)]
    if options.caffemodel is None:
        raise UsageError("--solverstate names the file of its weights", "give --caffemodel FILE, too")
    if others:
        raise UsageError(f"--caffemodel with {listing(others, 'and')}", "export one format at a time")
    if options.solverstate is not None and (options.ema or options.rgb):
        text = "--solverstate is of the weights as they were trained"
        raise UsageError(text, "leave --ema and --rgb out, or --solverstate")


def export_snapshot(folder: Path, options: ExportOptions) -> None:
    """What can go wrong is found before torch is imported; then one file is written, whole or not at all."""
    if options.double:
        raise UsageError("--double is for --caffemodel", "leave it out: the file has the numbers of the snapshot")
    kind = _kind(options)
    path = (
        Path(options.output)
        if options.output is not None
        else Path((ensemble_of(folder) or folder.name) + SUFFIX[kind])
    )
    _require_free(path, options.force)

    from stagerun.tools.weights import exporting
    from stagerun.tools.weights.formats import Format
    from stagerun.tools.weights.stored import Trust, open_snapshot

    wanted = exporting.Wanted(
        format=Format(SUFFIX[kind]), file=str(path), ema=options.ema, rgb=options.rgb, side=options.size
    )
    data, lines = exporting.export(open_snapshot(folder, Trust(options.trust_code)), wanted)
    _require_free(path, options.force)
    write_output(path, data)
    show("\n".join([f"wrote {path}, {size(len(data))}", *(f"  {line}" for line in lines)]))


def _kind(options: ExportOptions) -> str:
    kinds = [kind for kind in SUFFIX if getattr(options, kind)]
    if len(kinds) != 1:
        text = "one format at a time" if kinds else "which format?"
        raise UsageError(text, "give --safetensors, --torch, --onnx or --caffemodel FILE")
    (kind,) = kinds
    if kind != "onnx" and options.size is not None:
        raise UsageError(f"--size is for --onnx: with --{kind} images may have any size", "leave --size out")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None] if kind == "onnx" else []
    if missing:
        text = f"--onnx needs the package{'s' if len(missing) > 1 else ''} {listed(missing)}"
        raise UsageError(text, "pip install 'stagerun[onnx]'")
    return kind


def _require_free(path: Path, force: bool) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder", "give the file's name with --output")
    if not os.path.isdir(path.parent):
        raise UsageError(f"there is no folder {path.parent}", "make it, or give another file with --output")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists already", "--force replaces it; --output FILE names another")
