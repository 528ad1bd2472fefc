"""The schedule that `stagerun new` writes for a set of pictures, and why: stages, batch, rates and crop follow from the images and the network.

From random weights: stages in the shape of the gallery's fashion_collapse. From trained ones: the head alone, the whole network, a collapse.
Each stage begins at the rate at which the one before ends.
"""

import math
import os
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stagerun.base.errors import UsageError, nearest
from stagerun.base.recipe import Model
from stagerun.base.text import count
from stagerun.base.weights import Kind, place_of
from stagerun.language.networks import NETWORKS, TIMM, TORCHVISION, is_foreign, network_of
from stagerun.language.tree import quoted
from stagerun.tools.fmt import formatted

if TYPE_CHECKING:
    from stagerun.models.vision import Preprocessing

LARGEST_CROP = 64  # of images of several sizes, in a network for small ones
_ATTENTION = ("vit", "swin", "convnext", "deit", "beit", "mixer", "former", "cait")  # published with AdamW
_FEWEST_UPDATES = {False: 2000, True: 500}  # of all stages: from random weights, from trained ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """`train` and `val` are paths with their number of records, `side` the shortest side of any image in pixels, `shorter` the median of the
    training images' shorter sides, `mean` and `deviation` of B, G and R, or of grey; `sizes`: how many training images each class has; `mixed`: the
    images have several sizes."""

    train: tuple[str, int]
    val: tuple[str, int]
    classes: int
    side: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    sizes: tuple[int, ...] = ()
    mixed: bool = False
    shorter: int = 0

    @property
    def class_weight(self) -> list[str]:
        """Return weights that make all classes count alike in the loss: the mean number of images of a class over its number."""
        sizes = self.sizes or (1,) * self.classes
        return [f"{sum(sizes) / len(sizes) / max(1, size):.4g}" for size in sizes]


def network_for(model: str | None, weights: str | None) -> str:
    """Return the network of --model, or else of the published --weights. UsageError."""
    place = place_of(weights) if weights is not None else None
    if place is not None and place.kind is Kind.FILE and not os.path.exists(place.path):
        raise UsageError(
            f"--weights {weights}: no such file", "published ones are named `torchvision/NAME` or `timm/NAME`"
        )
    if model is None and place is not None:
        if not place.published:
            raise UsageError(
                f"--weights {weights}: the network is missing",
                "name it: `--model resnet18`, or `--model timm/resnet18` for one of timm's",
            )
        torchvisions = place.kind is Kind.TORCHVISION
        model = place.name.partition("-")[0] if torchvisions else TIMM + place.name.partition(".")[0]
    model = model or "resnet_small"
    if model.partition(":")[0].endswith(".py"):
        raise UsageError(f"--model {model}: a file of the schedule, which is made first", "name it in `model`, later")
    if model not in NETWORKS and not is_foreign(model):
        hint = nearest(model, NETWORKS) or "`stagerun help Model` lists them; timm's are `timm/NAME`"
        raise UsageError(f"--model {model}: no such network", hint)
    return model


class Starter:
    """Chooses a schedule. Loads torch, unless for the default network. UsageError."""

    def __init__(self, images: Images, model: str, weights: str | None) -> None:
        self.images, self.model, self.weights = images, model, weights
        self.place = place_of(weights or "")
        self.channels = len(images.mean) if weights is None else 3
        self.head, self.rest, self.head_bias = list[str](), list[str](), False
        self.published: Preprocessing | None = None
        if model != "resnet_small" or weights is not None:
            from stagerun.models.vision import published_preprocessing

            self.published = published_preprocessing(weights or model) or published_preprocessing(model)
        if weights is not None:
            self._find_head()
        tuned, number = weights is not None, images.train[1]
        self.batch = min(64 if tuned else 128, max(8, _power_of_two(number / 10)), _power_of_two(number))
        updates, least, most = number / self.batch, 12 if tuned else 8, 48 if tuned else 64
        self.epochs = min(most, max(least, _FEWEST_UPDATES[tuned] / updates))
        self.crop, self.why = self._crop()
        whole = not (tuned or images.mixed) and self.crop == images.shorter
        self.pad = max(2, self.crop // 8) if whole else 0
        self.reference, self.peak, self.decay = (64, 0.02, 1e-4) if tuned else (128, 0.1, 5e-4)
        self.type = "AdamW" if any(word in model.lower() for word in _ATTENTION) else "SGD"
        if self.type == "AdamW":
            self.peak, self.decay = 5e-4, 0.05
        elif not is_foreign(model) and network_of(model).batch_norm is None:
            self.peak /= 10  # higher rates diverge without BatchNorm

    def _find_head(self) -> None:
        """Find what depends on the number of classes, and patterns for the rest."""
        from stagerun.models import shapes, without_memory

        made = Model(name=self.model, num_classes=self.images.classes, channels=self.channels)
        network, other = without_memory(made), shapes(without_memory(replace(made, num_classes=made.num_classes + 1)))
        head = {name for name, shape in shapes(network).items() if other.get(name) != shape}
        self.head = sorted({f"{name.rpartition('.')[0]}.*" for name in head})
        self.head_bias = any(name.endswith("bias") for name in head)
        self.rest = list(_outside([name for name, _ in network.named_parameters()], head))

    def _crop(self) -> tuple[int, str]:
        """Return the side of the network's input, and why."""
        shorter, limits = self.images.shorter, network_of(self.model)
        small = self.model not in TORCHVISION and not is_foreign(self.model)
        wanted = self.published.crop if self.published else LARGEST_CROP if small else 224
        if self.weights is not None or self.model.startswith(TIMM) or limits.largest is not None or shorter >= wanted:
            return wanted, f"{self.model}'s size" if not small else "small and fast; `--model resnet18` takes 224"
        crop = max(limits.smallest, shorter if shorter <= LARGEST_CROP else shorter // 32 * 32)
        return crop, f"the images are smaller than {self.model}'s {wanted}"

    # -- the text

    def text(self, name: str) -> str:
        """Return schedule.prototxt."""
        (train, number), (val, evaluated) = self.images.train, self.images.val
        tuned, shape = self.weights is not None, f"num_classes: {self.images.classes} channels: {self.channels}"
        about = f"{count(number, 'image')} of {self.images.classes} classes, {'fine-tuned' if tuned else 'trained'} in the stages of a collapse."
        lines = [
            "# proto-file: protos/stagerun.proto",
            "# proto-message: Schedule\n#",
            *(f"# {line}" for line in textwrap.wrap(about, 118)),
            "#\n# lint: ignore other-sizes\n" if tuned else "",
            f"name: {quoted(name)}\n\nmodel {{ name: {quoted(self.model)} {shape} }}\n\ndata {{",
            f"train {{ source: {quoted(train)} images: {number} }}",
            f"val {{ source: {quoted(val)} images: {evaluated} }}\n}}\n",
            *("solver {", *self._shared(), "}\n"),
            *(self._tuning() if tuned else self._training()),
        ]
        return formatted("\n".join(lines) + "\n")

    def _shared(self) -> Iterator[str]:
        device_batch = self.batch // 2 if self.batch >= 32 else self.batch  # for one worker or two
        yield f"batch_size: {self.batch}\ndevice_batch_size: {device_batch}\ntest_batch_size: {self.batch}"
        of = self.reference
        yield f"base_lr_batch: {of}  # the rates below are for {of} images, and scale with batch_size"
        yield f'type: "{self.type}"\nmomentum: 0.9' + ("\nmomentum2: 0.999" if self.type == "AdamW" else "")
        yield f"weight_decay: {self.decay:g}\ndecay_from: WARMUP_END"
        for name in map(quoted, self.head):
            if self.head_bias:
                yield f"param {{ name: {name} kind: BIAS_AND_NORM decay_mult: 0 }}"
            yield f"param {{ name: {name} }}"
        if self.head:
            yield "param { kind: BIAS_AND_NORM lr_mult: 0.1 decay_mult: 0 }\nparam { lr_mult: 0.1 }"
        else:
            yield "param { kind: BIAS_AND_NORM decay_mult: 0 }"
        normal, crop = self._numbers(), f"crop_size: {self.crop}"
        if self.pad:
            yield f"transform_param {{\npad: {self.pad} mirror: true {crop}\n{normal}\n}}"
            yield f"test_transform_param {{ {crop} {normal} }}"
        else:
            area = f"random_resized_crop_param {{ min_area_ratio: 0.25 {self._resizing()} }}"
            yield f"transform_param {{\n{area}\n{crop} mirror: true\n{normal}\n}}"
            yield f"test_transform_param {{\n{self._middle()} {crop}\n{normal}\n}}"
        yield f"display: 20\nsnapshot_epoch: {self.epochs / 8:.3g}"

    def _numbers(self) -> str:
        if self.weights is not None and self.published is not None:
            return self.published.numbers
        values = (", ".join(f"{v:.4g}" for v in each) for each in (self.images.mean, self.images.deviation))
        return "mean_value: [{}] std_value: [{}]".format(*values)

    def _resizing(self) -> str:
        return f"resize_param {{ interp_mode: {'ANTIALIAS' if self.weights is not None else 'AUTO'} }}"

    def _middle(self) -> str:
        shorter = self.published.resize if self.weights is not None and self.published else self.crop * 8 // 7
        return f"random_resize_param {{ min_size: {shorter} {self._resizing()} }}"

    def _stage(self, name: str, part: float, rates: tuple[float, ...], first: str = "") -> str:
        """`part` of all epochs; `rates` as shares of the highest: of the warm-up's start if there are three, of the decay's start and end."""
        *start, base, end = (self.peak * rate for rate in rates)
        epochs = self.epochs * part
        warm = "".join(f" warmup_epoch: {epochs / 5:.3g} warmup_start_lr: {rate:.4g}" for rate in start)
        decay = f'lr_policy: "cosine" end_lr: {end:.4g}'
        if not end:
            clear = '"transform_param.random_resized_crop_param"'
            middle = f"\ntransform_param {{ {self._middle()} }}"
            if self.pad:
                clear, middle = '["transform_param.pad", "transform_param.mirror", "transform_param.crop_size"]', ""
            decay = f'lr_policy: "poly" power: 2\nweight_decay: {4 * self.decay:g}\nclear: {clear}{middle}'
        lines = f"base_lr: {base:.4g} {decay}\nmax_epoch: {epochs:.3g}{warm}"
        return f"stage {{\nname: {quoted(name)}\nsolver_param {{\n{first}{lines}\n}}\n}}"

    def _training(self) -> Iterator[str]:
        yield self._stage("init", 0.3, (0.1, 1, 0.6))
        yield self._stage("cyc1", 0.15, (0.6, 0.15))
        yield self._stage("cyc2", 0.19, (0.15, 0.5, 0.125))
        yield self._stage("cyc3", 0.18, (0.125, 0.4, 0.1))
        yield self._stage("collapse", 0.18, (0.1, 0))

    def _tuning(self) -> Iterator[str]:
        file = self.weights or ""
        if not self.place.published:
            file = os.path.abspath(file)
        drop, freeze = ("[" + ", ".join(map(quoted, names)) + "]" for names in (self.head, self.rest))
        weights = f"weights {{ file: {quoted(file)} drop: {drop} }}\nfreeze: {freeze}\n"
        yield self._stage("head", 1 / 6, (1, 0.1), weights)
        yield self._stage("all", 4 / 6, (0.1, 1, 0.1))
        yield self._stage("collapse", 1 / 6, (0.1, 0))

    # -- why

    def lines(self) -> Iterator[str]:
        """Say what was chosen."""
        number = self.images.train[1]
        if self.weights is None:
            yield f"network: {self.model} from random weights; `--weights` starts from trained ones, better for few images"
            yield "stages: warm-up and decay, three cycles, a collapse, as fashion_collapse"
            whose = "of these images"
        else:
            whose = "of these images: none are published"
            if self.published is not None:
                whose = f"of {self.model}'s published weights"
                if not self.place.published:
                    whose += "; if your file was trained with others, write those"
            yield f"network: {self.model} from {self.weights}, without {', '.join(self.head)}"
            yield "stages: the head alone, all at a tenth of its rate, a collapse"
        yield f"crop: {self.crop}: {self.why}; shorter sides of the images: {self.images.shorter} in the median"
        how = f"pad {self.pad}, random crop" if self.pad else "random resized crop; resize and middle to evaluate"
        yield f"augmentation: {how}; mirror: remove it where left and right differ, as in letters"
        yield f"mean and deviation: {whose}"
        yield f"batch: {self.batch}, so that an epoch has {round(number / self.batch)} updates"
        rate = self.peak * self.batch / self.reference
        yield f"rate: {self.type}, at most {rate:.3g}: {self.peak:g} for {self.reference} images, scaled by the batch"
        yield f"length: {self.epochs:.3g} epochs, {round(self.epochs * number / self.batch)} updates"


def _power_of_two(number: float) -> int:
    return 1 << math.floor(math.log2(max(1, number)))


def _outside(names: Iterable[str], head: set[str], above: str = "") -> Iterator[str]:
    """Yield the fewest patterns that fit all names but the head's."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(above + name.removeprefix(above).partition(".")[0], []).append(name)
    for group, members in groups.items():
        if head.isdisjoint(members):
            yield group if members == [group] else f"{group}.*"
        elif members != [group]:
            yield from _outside(members, head, f"{group}.")
