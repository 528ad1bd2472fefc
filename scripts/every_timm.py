"""Every classifier of timm up to 100 M parameters that takes images of 64 to 224 pixels, with fresh weights: built, looked at, trained
for two iterations of two images in fp32 with a snapshot in between, and resumed from that snapshot, to the same bits.

    scripts/every-timm [FILE] [PATTERN]    FILE: every-timm.txt, one line per network; PATTERN: of names, `*`

Resumable: networks that FILE has a line of are passed over. Ends with the count, and each failure with its reason. In little memory, one
network at a time, each in a process of its own; needs the extra `timm`.
"""

import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

SECONDS = 600  # that a network may take
MOST, SIDES = 100e6, (64, 224)
SCHEDULE = """
name: "every"
model {{ name: "timm/{name}" num_classes: 10 }}
data {{ train {{ source: "{images}" images: 8 }} }}
stage {{ name: "main" solver_param {{
  batch_size: 2 device_batch_size: 2 base_lr: 0.001 lr_policy: "fixed" max_iter: 2 snapshot: 1
  transform_param {{ mean_value: 127 scale: 0.0157 }}
}} }}
"""


def side_of(name: str) -> int | None:
    """The size of its images; None for a network that takes none from 64 to 224 pixels, or is too large."""
    import timm
    import torch

    known = timm.get_pretrained_cfg(name)
    size = known.input_size[-1] if known is not None else 224
    smallest = known.min_input_size[-1] if known is not None and known.min_input_size is not None else SIDES[0]
    if smallest > SIDES[1] or (known is not None and known.fixed_input_size and size > SIDES[1]):
        return None
    try:
        with torch.device("meta"):
            net = timm.create_model(name, num_classes=10)
    except Exception:  # what computes with its tensors needs memory
        net = timm.create_model(name, num_classes=10)
    if sum(p.numel() for p in net.parameters()) > MOST:
        return None
    return size if known is not None and known.fixed_input_size else max(SIDES[0], smallest)


def images_of(folder: Path, side: int) -> Path:
    from stagerun.data.synthetic import write_synthetic

    path = folder / f"images{side}"
    if not path.exists():
        write_synthetic(str(path), 8, side, side, 3, 10, False)
    return path


def trained(schedule: Path, out: Path) -> str:
    """The id of the snapshot at its end."""
    import torch

    from stagerun import store
    from stagerun.comm import SoloComm
    from stagerun.language import load
    from stagerun.system.world import World
    from stagerun.train.keeper import Keeper, Selection
    from stagerun.train.walk import run

    out.mkdir(exist_ok=True)
    loaded = load(schedule)
    keeper = Keeper(loaded, out, Selection())
    keeper.open()
    try:
        for _ in run(loaded, str(out), SoloComm(), World(), torch.device("cpu"), keeper, lambda: False):
            pass
    finally:
        keeper.close()
    (end,) = [ref for ref in store.inventory(store.LocalDisk(), out).snapshots if ref.iter == 2]
    return f"{end.name} {end.id}"


def tried(name: str, side: int, folder: Path) -> None:
    """AssertionError, StagerunError, or whatever goes wrong."""
    import shutil

    schedule, out = folder / "schedule", folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    schedule.mkdir(exist_ok=True)
    (schedule / "schedule.prototxt").write_text(SCHEDULE.format(name=name, images=images_of(folder, side)))
    whole = trained(schedule, out)
    shutil.rmtree(out / "snapshots" / whole.split()[0])
    resumed = trained(schedule, out)
    assert whole.split()[1] == resumed.split()[1], "resumed, it has other bits"


def one(name: str, folder: Path, answer: "multiprocessing.connection.Connection") -> None:
    """In a process of its own: says the side, then the outcome."""
    import torch

    from stagerun.base.errors import StagerunError

    torch.set_num_threads(1)
    began = time.monotonic()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            side = side_of(name)
            if side is None:
                answer.send(f"{name}: passed over")
                return
            for taken in dict.fromkeys((side, SIDES[1])):
                try:
                    tried(name, taken, folder)
                    break
                except Exception:
                    if taken == SIDES[1]:
                        raise
        answer.send(f"{name}: ok, {taken} pixels, {time.monotonic() - began:.1f} s")
    except BaseException as error:
        text = error.render() if isinstance(error, StagerunError) else f"{type(error).__name__}: {error}"
        answer.send(f"{name}: FAILED: {json.dumps(text[:500])}")


def outcome(name: str, folder: Path) -> str:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=one, args=(name, folder, theirs))
    process.start()
    theirs.close()
    line = f"{name}: FAILED: more than {SECONDS} s"
    if ours.poll(SECONDS):
        try:
            line = ours.recv()
        except EOFError:
            line = f"{name}: FAILED: the process was killed"
    process.kill()
    process.join()
    return line


def in_turn() -> list[str]:
    """All names, the first of each of timm's modules before the second of any: so half of them are of every kind."""
    import timm

    modules = [timm.list_models(module=module) for module in timm.list_modules()]
    turns = {name: number for names in modules for number, name in enumerate(names)}
    return sorted(timm.list_models(), key=lambda name: (turns.get(name, 0), name))


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "every-timm.txt")
    pattern = sys.argv[2] if len(sys.argv) > 2 else "*"
    from stagerun.models.vision import torchvision_models

    torchvision_models()
    import timm

    import stagerun.train.walk  # noqa: F401  before the fork: so it is loaded once

    os.environ["HF_HUB_OFFLINE"] = "1"
    file.touch()
    known = {line.partition(":")[0] for line in file.read_text().splitlines()}
    with tempfile.TemporaryDirectory() as folder:
        for name in in_turn():
            if name not in known and fnmatch(name, pattern):
                line = outcome(name, Path(folder))
                with open(file, "a") as stream:
                    print(line, file=stream)
                print(line, flush=True)
    lines = file.read_text().splitlines()
    failed = [line for line in lines if ": FAILED" in line]
    passed = sum(": ok" in line for line in lines)
    print("\n".join([*failed, f"{passed} of {passed + len(failed)} networks of timm {timm.__version__} pass"]))


if __name__ == "__main__":
    main()
