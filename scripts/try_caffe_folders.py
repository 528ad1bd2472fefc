"""See scripts/try-caffe-folders."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stagerun.data.synthetic import write_synthetic
from stagerun.language.proto import caffe_pb2
from stagerun.tools.caffe.text import is_solver

IMAGES, CLASSES = 8, 2
SIZES = {"mnist": (28, 1), "cifar": (32, 3)}  # by a word of the path; of others 256 pixels and 3 channels
# One update of two images, and an evaluation.
STEP = (
    "max_iter=1",
    "warmup_iter=0",
    "batch_size=2",
    "device_batch_size=2",
    "test_batch_size=2",
    "snapshot=0",
    "test_interval=0",
)
SECONDS = 900


def main() -> int:
    check, parts = "--check" in sys.argv[2:], [word for word in sys.argv[2:] if word != "--check"]
    if not sys.argv[1:] or not Path(sys.argv[1]).is_dir():
        print(
            "usage: scripts/try-caffe-folders FOLDER [--check] [PART...]; no such folder" if sys.argv[1:] else __doc__
        )
        return 64
    failed = 0
    with tempfile.TemporaryDirectory() as made:
        top = Path(made) / "caffe"
        shutil.copytree(sys.argv[1], top)
        for net in top.rglob("*.prototxt"):
            net.write_text(re.sub(r'((?:source|mean_file): ")/+', r"\1made-up/", net.read_text(errors="replace")))
        solvers = [file for file in sorted(top.rglob("*.prototxt")) if is_solver(file.read_bytes())]
        if parts:
            solvers = [file for file in solvers if any(part in str(file.relative_to(top)) for part in parts)]
        for solver in solvers:
            start = time.monotonic()
            outcome, fine = tried(solver, top, Path(made), step=not check)
            failed += not fine
            print(f"{solver.relative_to(top)}\t{outcome}\t{time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(solvers)} solvers: {len(solvers) - failed} passed, {failed} did not")
    return 0


def tried(solver: Path, top: Path, made: Path, step: bool) -> tuple[str, bool]:
    """The outcome in words, and whether it was trained."""
    root = next((top / name for name in os.listdir(top) if (top / name) in solver.parents), top)
    for net in root.rglob("*.prototxt"):
        if net.parent == solver.parent:
            make_files(net.read_text(errors="replace"), root)
    out = made / "out"
    for place in (out, made / "run"):
        shutil.rmtree(place, ignore_errors=True)
    counts = ("--images", str(IMAGES), "--val-images", str(IMAGES), "--workers", "1")
    code, said = stagerun("import", "caffe", str(solver.parent), "--out", str(out), "--order", solver.name, *counts)
    if code:
        wrong = re.findall(r"^(\S+:\d+:\d+: .*)$", said, re.MULTILINE)
        return f"import: {code}: {'; '.join(one.replace(str(top) + '/', '') for one in wrong) or said[-300:]}", False
    stage = next(file.stem for file in sorted(out.glob("*.prototxt")) if "# From " in file.read_text())
    given = [f"{stage}.{change}" for change in STEP]
    if '"?"' in (text := (out / "schedule.prototxt").read_text()):  # DummyData
        lmdb = str(images(made / "made-up", 256, 3))
        given += [f'data.train.source="{lmdb}"', *([f'data.val.source="{lmdb}"'] if text.count('"?"') > 1 else [])]
    sets = [word for change in given for word in ("--set", change)]
    code, said = stagerun("check", str(out), *sets)
    if code:
        return f"check: {code}: {said.strip()[-300:]}", False
    if not step:
        return "passed", True
    code, said = stagerun("run", str(out), *sets, "--out", str(made / "run"), "--nproc", "1")
    if code:
        return f"run: {code}: {said.strip()[-300:]}", False
    loss = re.findall(r"test top-1 .*?loss ([0-9.]+)", said) or re.findall(r"loss ([0-9.]+)", said)
    return f"passed, loss {loss[-1] if loss else '?'} after one step", True


def stagerun(*words: str) -> tuple[int, str]:
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "stagerun", *words], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"more than {SECONDS} s"
    return ended.returncode, ended.stdout + ended.stderr


def make_files(net: str, root: Path) -> None:
    """The LMDBs and mean images that a net names, below Caffe's root."""
    for layer in re.split(r"^layers? *\{", net, flags=re.MULTILINE):
        for path in re.findall(r'source: "([^"]+)"', layer):
            size, channels = next((shape for word, shape in SIZES.items() if word in path), (256, 3))
            resized = re.search(r"new_height: ([0-9]+)", layer)  # as the LMDB must be that stands for a list of files
            place = root / (path.removesuffix(".txt") + "_lmdb" if path.endswith(".txt") else path)
            if resized:  # another net of the folder may have it in the usual size
                shutil.rmtree(place, ignore_errors=True)
            images(place, int(resized[1]) if resized else size, channels)
            if path.endswith(".txt"):
                (root / path).write_text("")
    for path in re.findall(r'mean_file: "([^"]+)"', net):
        size, channels = next((shape for word, shape in SIZES.items() if word in path), (256, 3))
        blob = caffe_pb2.BlobProto(num=1, channels=channels, height=size, width=size)
        blob.data.extend([120.0] * (channels * size * size))
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(blob.SerializeToString())


def images(place: Path, size: int, channels: int) -> Path:
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_synthetic(str(place), IMAGES, size, size, channels, CLASSES, False)
    return place


if __name__ == "__main__":
    sys.exit(main())
