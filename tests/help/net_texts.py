"""Net prototxts as published ones are built, written in a few lines each; and what tests of nets ask of a text."""

from facade import Problems, RecipeError, resolve

IMAGE = (3, 32, 32)
DATA = 'layer { name: "data" type: "Data" top: "data" top: "label" }\n'
END = """
layer { name: "ip" type: "InnerProduct" bottom: "LAST" top: "ip" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def canonical(text: str) -> str:
    problems = Problems()
    found = resolve.read(text, "net", problems)
    assert found is not None, RecipeError(problems.all()).render()
    return found.canonical()


def net_from(text: str, shape: tuple[int, int, int] | None = IMAGE) -> object:
    """RecipeError with all mistakes."""
    problems = Problems()
    read_text = resolve.read(text, "net", problems)
    found = read_text and resolve.resolve(read_text, shape, problems)
    if found is None:
        raise RecipeError(problems.all())
    return found


def between(*layers: str) -> str:
    """Layers between the images and a linear layer with its loss; the last one's top is `last`."""
    return DATA + "\n".join(layers) + END.replace("LAST", "last")


def only(of: object, name: str) -> object:
    return next(layer for layer in of.train.layers if layer.name == name)


# -- published nets; sizes are those of the papers and of Caffe's examples


class Writer:
    """Layers one below the other; `last` is the top that the next one takes."""

    def __init__(self, name: str, channels: int, size: int) -> None:
        dims = " ".join(f"dim: {n}" for n in (1, channels, size, size))
        self.text = (
            f'name: "{name}"\nlayer {{ name: "data" type: "Input" top: "data" input_param {{ shape {{ {dims} }} }} }}\n'
        )
        self.last = "data"

    def layer(self, name: str, kind: str, *bottoms: str, top: str = "", inside: str = "") -> str:
        taken = " ".join(f'bottom: "{b}"' for b in bottoms or (self.last,))
        self.last = top or name
        self.text += f'layer {{ name: "{name}" type: "{kind}" {taken} top: "{self.last}" {inside} }}\n'
        return self.last

    def conv(self, name: str, out: int, kernel: int, *bottom: str, relu: bool = True, **settings: object) -> str:
        more = " ".join(f"{key}: {value}" for key, value in settings.items())
        inside = f"convolution_param {{ num_output: {out} kernel_size: {kernel} {more} }}"
        top = self.layer(name, "Convolution", *bottom, inside=inside)
        return self.relu(name) if relu else top

    def relu(self, name: str) -> str:
        return self.layer(f"relu_{name}", "ReLU", top=self.last)

    def pool(self, name: str, kernel: int, stride: int, *bottom: str, method: str = "MAX", pad: int = 0) -> str:
        inside = f"pooling_param {{ pool: {method} kernel_size: {kernel} stride: {stride} pad: {pad} }}"
        return self.layer(name, "Pooling", *bottom, inside=inside)

    def linear(self, name: str, out: int, *bottom: str) -> str:
        return self.layer(name, "InnerProduct", *bottom, inside=f"inner_product_param {{ num_output: {out} }}")

    def end(self) -> str:
        self.layer("prob", "Softmax")
        return self.text


def alexnet() -> str:
    net = Writer("AlexNet", 3, 227)
    for i, (out, kernel, settings) in enumerate(
        (
            (96, 11, {"stride": 4}),
            (256, 5, {"pad": 2, "group": 2}),
            (384, 3, {"pad": 1}),
            (384, 3, {"pad": 1, "group": 2}),
            (256, 3, {"pad": 1, "group": 2}),
        ),
        1,
    ):
        net.conv(f"conv{i}", out, kernel, **settings)
        if i < 3:
            net.layer(f"norm{i}", "LRN")
        if i not in (3, 4):
            net.pool(f"pool{i}", 3, 2)
    for i in (6, 7):
        net.linear(f"fc{i}", 4096)
        net.relu(f"fc{i}")
        net.layer(f"drop{i}", "Dropout", top=net.last)
    net.linear("fc8", 1000)
    return net.end()


def resnet50(intel: bool = False) -> str:
    """As published, with the stride in the first convolution of a block; Intel's for many nodes has it in the second, and a bias in conv1."""
    net = Writer("ResNet-50", 3, 224)

    def normed(name: str, out: int, kernel: int, *bottom: str, relu: bool = True, **settings: object) -> str:
        net.conv(name, out, kernel, *bottom, relu=False, **{"bias_term": "false"} | settings)
        place = name if name == "conv1" else name.removeprefix("res")
        under = "_" if name == "conv1" else ""
        net.layer(f"bn{under}{place}", "BatchNorm", top=net.last)
        net.layer(f"scale{under}{place}", "Scale", top=net.last, inside="scale_param { bias_term: true }")
        return net.relu(name) if relu else net.last

    normed("conv1", 64, 7, stride=2, pad=3, bias_term=str(intel).lower())
    below = net.pool("pool1", 3, 2)
    for group, (count, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 2):
        for i in range(count):
            name, stride = f"res{group}{'abcdef'[i]}", 2 if i == 0 and group > 2 else 1
            branch = f"{name}_branch"
            beside = normed(f"{branch}1", 4 * width, 1, below, stride=stride, relu=False) if i == 0 else below
            normed(f"{branch}2a", width, 1, below, stride=1 if intel else stride)
            normed(f"{branch}2b", width, 3, pad=1, stride=stride if intel else 1)
            normed(f"{branch}2c", 4 * width, 1, relu=False)
            net.layer(name, "Eltwise", beside, net.last)
            below = net.relu(name)
    net.pool("pool5", 7, 1, method="AVE")
    net.linear("fc1000", 1000)
    return net.end()
