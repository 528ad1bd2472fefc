"""`stagerun export`: what can go wrong is found before torch is imported; then one file is written, whole or not at all."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from stagerun.cli.ending import show
from stagerun.errors import UsageError
from stagerun.store.write import write_output
from stagerun.text import size

SUFFIX = {"safetensors": ".safetensors", "torch": ".pth", "onnx": ".onnx"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    kinds: tuple[str, ...]  # of SUFFIX; one is right
    output: str | None
    force: bool
    ema: bool
    rgb: bool
    side: int | None


def export_snapshot(folder: Path, options: ExportOptions) -> None:
    kind = _kind(options)
    path = Path(options.output) if options.output is not None else Path(folder.name + SUFFIX[kind])
    _require_free(path, options.force)

    from stagerun.engine.export import Format
    from stagerun.train.exporting import Wanted, export
    from stagerun.train.stored import open_snapshot

    wanted = Wanted(format=Format(SUFFIX[kind]), file=str(path), ema=options.ema, rgb=options.rgb, side=options.side)
    data, lines = export(open_snapshot(folder), wanted)
    _require_free(path, options.force)
    write_output(path, data)
    show("\n".join([f"wrote {path}, {size(len(data))}", *(f"  {line}" for line in lines)]))


def _kind(options: ExportOptions) -> str:
    if len(options.kinds) != 1:
        raise UsageError(
            "one format at a time" if options.kinds else "which format?", "give --safetensors, --torch or --onnx"
        )
    (kind,) = options.kinds
    if kind != "onnx" and options.side is not None:
        raise UsageError(f"--size is for --onnx: with --{kind} images may have any size", "leave --size out")
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None] if kind == "onnx" else []
    if missing:
        raise UsageError(
            f"--onnx needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}",
            "pip install 'stagerun[onnx]'",
        )
    return kind


def _require_free(path: Path, force: bool) -> None:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder", "give the file's name with --output")
    if not os.path.isdir(path.parent):
        raise UsageError(f"there is no folder {path.parent}", "make it, or give another file with --output")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} exists already", "--force replaces it; --output FILE names another")
