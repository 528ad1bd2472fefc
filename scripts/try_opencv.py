"""What scripts/try-opencv does: nets with fresh weights as stagerun exports them, through OpenCV and through torch."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from stagerun.base.errors import Problems
from stagerun.base.recipe import Model
from stagerun.language.net import net_of, read
from stagerun.models.net import build
from stagerun.tools.weights.caffe import caffemodel

GOLDEN = Path("tests/golden/caffe")
NETS = (f"{GOLDEN}/lenet.prototxt:28", f"{GOLDEN}/bnnet.prototxt:28")
LEFT_OUT = re.compile(r'type: "(Data|ImageData|DummyData|Input|SoftmaxWithLoss|Accuracy|Split)"')
THEIRS = """
import sys, cv2, numpy as np
net = cv2.dnn.readNetFromCaffe(sys.argv[1] + "/deploy.prototxt", sys.argv[1] + "/x.caffemodel")
net.setInput(np.load(sys.argv[1] + "/images.npy"))
np.save(sys.argv[1] + "/theirs.npy", net.forward(sys.argv[2]))
print(cv2.__version__)
"""


def compared(path: str, side: int, python: str, folder: Path) -> tuple[str, float]:
    """OpenCV's version, and the largest difference between the logits of both, as a share of the largest logit."""
    problems = Problems()
    text = read(Path(path).read_bytes(), path, problems)
    assert text is not None and not problems, [problem.message for problem in problems.all()]
    channels = 1 if side == 28 else 3
    shape = (channels, side, side)
    net = net_of(text.canonical(), shape)
    torch.manual_seed(1)
    network = build(net).eval()
    images = torch.rand(2, *shape)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():  # Caffe's default filler
                parameter.uniform_(-0.1, 0.1)
        for name, buffer in network.named_buffers():
            if name.endswith("running_mean"):
                buffer.uniform_(-0.1, 0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
        ours = network.eval()(images).numpy()
    model = Model(name=path, num_classes=net.num_classes, channels=channels, net=text.canonical(), input_shape=shape)
    (folder / "x.caffemodel").write_bytes(caffemodel(model, network.state_dict(), double=False))
    lines = [line for line in text.canonical().splitlines() if not LEFT_OUT.search(line) and "phase: TRAIN" not in line]
    dims = " ".join(f"dim: {n}" for n in (2, *shape))
    (folder / "deploy.prototxt").write_text("\n".join([f'input: "{net.test.images}" input_shape {{ {dims} }}', *lines]))
    np.save(folder / "images.npy", images.numpy())
    last = next(layer.name for layer in reversed(net.test.layers) if net.test.logits in layer.tops)
    done = subprocess.run([python, "-c", THEIRS, str(folder), last], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    theirs = np.load(folder / "theirs.npy").reshape(ours.shape)
    return done.stdout.strip(), float(np.abs(ours - theirs).max() / np.abs(ours).max())


def main() -> None:
    python, *nets = sys.argv[1:]
    for one in nets or NETS:
        path, _, side = one.rpartition(":")
        with tempfile.TemporaryDirectory() as folder:
            version, difference = compared(path, int(side), python, Path(folder))
        print(f"{path}: OpenCV {version} answers as the network, to {difference:.1e} of the largest logit")
        if not difference <= 1e-4:
            sys.exit("that is another answer")


if __name__ == "__main__":
    main()
