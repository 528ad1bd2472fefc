"""The manual: what `stagerun help NAME` prints, from the comments of stagerun.proto. Pure."""

import re
import textwrap
from collections.abc import Collection, Iterator, Mapping

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from stagerun.base.errors import UsageError, nearest
from stagerun.base.proto import comments, stagerun_pb2
from stagerun.language import tree
from stagerun.language.layers import partner
from stagerun.language.ranges import CHOICES, RETIRED
from stagerun.language.tree import is_message
from stagerun.manual.pages import PAGES

# Where the comment says what a change of the file's bytes does, "makes no snapshot stale" would be about its name alone.
_FILE = re.compile("file of the same bytes|change of the file")

_TYPES = {
    FieldDescriptor.TYPE_INT64: "whole number",
    FieldDescriptor.TYPE_DOUBLE: "number",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "text in quotes",
}


def help_text(name: str) -> str:
    """The manual of a field (`base_lr`, `Solver.base_lr`, `transform_param.crop_size`, `solver.base_lr`), a message or
    an enum, of the field that has such a value (`poly_cyc`, `LARS`), or of a topic (`resume`); an overview for ''. A name that
    several messages have prints all of them. `weight decay` and `adam` are found, too. UsageError for an unknown name.
    """
    if not name:
        return _overview()
    messages = {m.name: m for m in _messages()}
    enums = {enum_name(e): e for e in _enums()}
    if name in messages:
        return _message(messages[name])
    for known, kind in enums.items():
        if name in (known, kind.name):
            return _enum(kind)
    *path, last = name.split(".")
    fields = [
        f for m in messages.values() for f in m.fields if f.name == last and (not path or path[-1] in _ways_to(m))
    ]
    gone = [f"{f.containing_type.name}.{f.name} was retired: {hint}" for f in fields if (hint := tree.retired(f))]
    named = [kind.values_by_name[name] for kind in _enums() if name in kind.values_by_name]
    gone += [f"{name} was retired: {hint}" for value in named if (hint := tree.retired_value(value))]
    gone += [f"{name} was retired: {texts[name]}" for texts in RETIRED.values() if name in texts]
    if gone and not any(not tree.retired(f) for f in fields):
        return "\n".join(gone)
    fields = [f for f in fields if not tree.retired(f)]
    if fields and (len(path) < 2 or _follows(path, last)):
        return "\n\n".join(_field(f) for f in fields)
    meant = [key for key, values in CHOICES.items() if name in values]  # a policy, a solver type, a network
    meant += [f"{m.name}.{f.name}" for m in messages.values() for f in tree.fields(m) if name in value_names(f)]
    if meant:
        return "\n\n".join(help_text(key) for key in meant)
    if topic := topic_text(name):
        return topic
    everything = [*PAGES, *messages, *enums, *WORDS, *(f.name for m in messages.values() for f in m.fields)]
    everything += [f"{m.name}.{f.name}" for m in messages.values() for f in tree.fields(m)]
    values = {value for m in messages.values() for f in tree.fields(m) for value in value_names(f)}
    spelled = "_".join(re.split(r"[\s_-]+", name.strip().lower()))
    for known in [*everything, *(value for values in CHOICES.values() for value in values), *sorted(values)]:
        if known.lower() == spelled and known != name:
            return help_text(known)
    raise UsageError(f"the manual has no `{name}`", nearest(name, everything) or "`stagerun help` lists what there is")


def value_names(field: FieldDescriptor) -> list[str]:
    """The values that a field takes of its enum."""
    if field.enum_type is None:
        return []
    return [v.name for v in field.enum_type.values if not tree.retired_value(v) and v.name not in refused(field)]


def _messages() -> list[Descriptor]:
    return list(stagerun_pb2.DESCRIPTOR.message_types_by_name.values())


def _enums() -> Iterator[EnumDescriptor]:
    yield from stagerun_pb2.DESCRIPTOR.enum_types_by_name.values()
    for message in _messages():
        yield from message.enum_types


def enum_name(kind: EnumDescriptor) -> str:
    return f"{kind.containing_type.name}.{kind.name}" if kind.containing_type else str(kind.name)


def _ways_to(message: Descriptor) -> set[str]:
    """What may stand before the dot: the message, or a field that holds it."""
    return {message.name, *(f.name for m in _messages() for f in m.fields if f.message_type is message)}


def _follows(path: list[str], last: str) -> bool:
    """Whether a name of three words or more leads from field to field: `solver.transform_param.pad`."""
    at = [m for m in _messages() if path[0] in _ways_to(m)]
    for word in [*path[1:], last]:
        fields = [f for m in at for f in m.fields if f.name == word]
        at = [f.message_type for f in fields if is_message(f)]
        if not fields:
            return False
    return True


def _type(field: FieldDescriptor) -> str:
    if is_message(field):
        base = str(field.message_type.name)
    elif field.enum_type is not None:
        base = ", ".join(value_names(field))
    else:
        base = _TYPES[field.type]
    return f"{base}, any number of times" if field.is_repeated else base


def _head(field: FieldDescriptor) -> str:
    value = tree.default(field)
    default = "" if value is None else f"   default: {tree.canonical(value, field)}"
    return f"{field.containing_type.name}.{field.name}   {_type(field)}{default}"


def _indented(name: str, margin: str = "  ") -> str:
    return "\n".join((margin + line).rstrip() for line in comments().get(name, "").split("\n"))


def _field(field: FieldDescriptor) -> str:
    name = f"{field.containing_type.name}.{field.name}"
    text = f"{_head(field)}\n{_indented(name)}"
    if other := partner(field):
        text += f"\n  See `{other}`: one of the two can be given."
    if not tree.identity(field) and not _FILE.search(" ".join(comments().get(name, "").split())):
        text += "\n  Changing it makes no snapshot stale."
    if is_message(field):
        text += f"\n  Its fields: `stagerun help {field.message_type.name}`."
    if field.enum_type is not None:
        text += "\n" + _values(field.enum_type, refused(field))
    return text


# Fields that take a method of compression, and the methods that they don't take.
REFUSED = {"CompressionParameter.allow": {"NONE", "AUTO"}, "CompressionRule.method": {"AUTO"}}


def refused(field: FieldDescriptor) -> set[str]:
    """Values of its enum that the field doesn't take."""
    return REFUSED.get(f"{field.containing_type.name}.{field.name}", set())


def value_text(kind: EnumDescriptor, value: str) -> str:
    """The manual of one value of an enum."""
    name = f"{enum_name(kind)}.{value}"
    return f"{name}\n{_indented(name)}".rstrip()


def _values(kind: EnumDescriptor, but: Collection[str] = ()) -> str:
    lines = []
    for value in kind.values:
        if value.name in but or tree.retired_value(value):
            continue
        comment = comments().get(f"{enum_name(kind)}.{value.name}", "").replace("\n", "\n      ")
        lines.append(f"    {value.name}" + (f"\n      {comment}" if comment else ""))
    return "\n".join(lines)


def _message(message: Descriptor) -> str:
    width = max(len(f.name) for f in tree.fields(message))
    lines = [message.name, _indented(message.name), ""]
    lines += [
        f"  {f.name:{width}}  {first_sentence(f'{message.name}.{f.name}') or _type(f)}" for f in tree.fields(message)
    ]
    return "\n".join(lines)


def _enum(kind: EnumDescriptor) -> str:
    name = enum_name(kind)
    comment = f"{_indented(name)}\n" if name in comments() else ""
    return f"{name}\n{comment}{_values(kind)}"


def _overview() -> str:
    messages = {m.name: first_sentence(m.name) for m in _messages()}
    topics = textwrap.wrap(", ".join(TOPICS), 118, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "Pages of the manual; `stagerun help PAGE` shows one:",
            "",
            *_columns(PAGES),
            "",
            "Messages of the solver files; `stagerun help NAME` prints one, or one of their fields:",
            "",
            *_columns(messages),
            "",
            "Topics, under other names too; `stagerun help lint` lists what the linter looks for:",
            "",
            *topics,
        ]
    )


def _columns(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries))
    return [f"  {name:{width}}  {says}" for name, says in entries.items()]


def first_sentence(name: str) -> str:
    """The comment up to the first full stop that ends a sentence, on one line."""
    text = " ".join(comments().get(name, "").split())
    return re.split(r"(?<!\.)\. ", text)[0].rstrip(".:")  # not in `0 .. 9`


# -- words that people look up and that are not the name of a field: what they are called here, or that they are not possible
#
# A page of the manual under one of these names would come before its entry here.

# In the first line of each its name and synonyms, in small letters.
_TEXT = """\
own images, my images, own data, dataset, dataloader, data loader, csv
  `stagerun data import FOLDER LMDB` makes an LMDB of a folder that has a folder of images for each class: once for
  training, once for evaluation; pictures of many sizes with `--resize-height N --resize-width N`. `stagerun new NAME
  --train LMDB --val LMDB` makes a schedule for them.
  See `stagerun help your-own-images`, `stagerun help Source`, `stagerun new --help`, `stagerun data import --help`.

collapse, cooldown, annealing
  A short stage that ends a training: a steep decay to zero, no augmentation, often more weight decay. It starts from
  the end of any stage, or from an iteration of it. `stagerun new` makes a schedule that has one.
  See `stagerun help designing`, `stagerun help from`, `stagerun help lr_policy`, `stagerun help weight_decay`,
  `stagerun help transform_param`.

frozen, freezing, unfreeze, unfreezing, lock, thaw, backbone, layer freezing, frozen batchnorm
  `freeze: "layer1.*"` in a stage leaves these parameters as they are, and the statistics of BatchNorm with them. The
  stage after it trains them again, if it doesn't say the same. `param` with `lr_mult: 0` freezes parameters alone.
  See `stagerun help fine-tuning`, `stagerun help Solver.freeze`, `stagerun help ParamSpec`.

pretrained, transfer, finetune, fine tune, transfer learning, init weights, load weights, head, download, huggingface, hugging face
  A stage starts from the weights of another stage, `from`, or from those that `weights` names: a file, a snapshot of
  another run, or what torchvision and timm publish; `stagerun check --fetch` downloads that. `drop: "fc.*"` in it
  draws a head anew.
  See `stagerun help fine-tuning`, `stagerun help Solver.weights`, `stagerun help StageEntry.from`, `stagerun help
  Carry`, `stagerun help Solver.freeze`, `stagerun plan --help`, `stagerun check --help`.

resize, image size, resolution, input size, crop
  Once, when the LMDB is made: `stagerun data import --resize-shorter N`, or `--resize-height N --resize-width N`.
  Each time an image is read: `random_resize_param`, `random_resized_crop_param`. The network gets `crop_size`.
  See `stagerun help crop_size`, `stagerun help random_resize_param`, `stagerun help crop_size_ramp_param`, `stagerun
  data import --help`.

augmentation, augment, flip, rotation, cutout, random erasing, random resized crop, randaugment, mixup, cutmix, normalisation, transforms, own augmentation, custom augmentation, albumentations
  `transform_param` says what is done to each training image, `mixup_alpha` and `cutmix_alpha` to pairs of them. A
  stage inherits it field by field; `clear: "transform_param.cutout_size"` takes a field away. torchvision's
  `RandomResizedCrop(scale=(0.5, 1))` is `random_resized_crop_param { min_area_ratio: 0.5 }`. Only RandAugment,
  TrivialAugment and a function of your own, `python: "aug.py:augment"`, rotate.
  See `stagerun help TransformParameter`, `stagerun help mixup_alpha`, `stagerun help cutmix_alpha`, `stagerun help
  label_smoothing`, `stagerun data show --help`.

warmup, warm up, cycle, cycles, warm restart, re warmup, rewarmup, peak, joint, joints
  A straight line from `warmup_start_lr` to `base_lr` at the start of a stage. A later stage that has one is a cycle: its
  `warmup_start_lr` is the rate at which the stage before ends. `stagerun plan DIR` notes every jump at a joint.
  See `stagerun help warmup_iter`, `stagerun help warmup_start_lr`, `stagerun help decay_from`.

tree, trees, branch, branches, sweep, grid, grid search, hyperparameters, names
  A stage starts from any stage, or from an iteration of it: `from: "trunk@4000"`. Several parents, or a `sweep` for each
  combination of values, make a stage each. What they share is trained once.
  See `stagerun help designing`, `stagerun help StageEntry`, `stagerun help Sweep`, `stagerun help Ensemble`.

stale, fresh, redo, edit, digest, identity
  A stage is stale if a field that its snapshots depend on has changed, or its parent has. `run` then stops and asks for
  `--redo STAGE`, or for the old value. `plan` says which stages are stale, and why. Names and comments don't count.
  See `stagerun help running-and-resuming`, `stagerun run --help`, `stagerun plan --help`.

inherit, inherited, merge, override, default
  A stage inherits `solver` of the schedule field by field, inside messages too. A list replaces a list; `clear` takes
  fields away. `stagerun plan DIR --why STAGE.FIELD` shows where a value comes from.
  See `stagerun help designing`, `stagerun help clear`, `stagerun help Schedule.solver`, `stagerun plan --help`.

resume, continue, restart, checkpoint, crash
  The same `stagerun run DIR` goes on after anything. `snapshot` says how much a crash costs at most; a stop saves.
  See `stagerun help running-and-resuming`, `stagerun help snapshot`, `stagerun help keep_snapshots`, `stagerun run
  --help`, `stagerun status --help`.

learning rate, lr, scheduler, decay, lr finder, find lr, layerwise lr, lr per layer
  `base_lr` and `lr_policy`; `stagerun plan DIR --plot FILE.svg` draws it over all stages. `stagerun rehearse DIR
  --find-lr STAGE` tries rates; `param { name: "layer1.*" lr_mult: 0.1 }` changes it for some of the network.
  See `stagerun help designing`, `stagerun help base_lr`, `stagerun help lr_policy`, `stagerun help base_lr_batch`,
  `stagerun help ParamSpec`, `stagerun plan --help`, `stagerun rehearse --help`.

epochs, length, duration
  Every length can be given in iterations (weight updates) or in epochs: `max_iter` or `max_epoch`.
  See `stagerun help max_iter`, `stagerun help max_epoch`.

batch, gradient accumulation, accumulation, out of memory, oom
  `batch_size` counts over the whole job. `device_batch_size` is what one worker computes at once: less of it needs
  less memory, and gradients are accumulated.
  See `stagerun help batch_size`, `stagerun help device_batch_size`.

optimizer, optimiser
  `type` says how a gradient moves a weight.
  See `stagerun help Solver.type`, `stagerun help momentum`, `stagerun help weight_decay`.

validation, evaluation, accuracy, evaluate, metrics, validation set, test set, second val, mean average precision, confusion matrix, per class, recall, f1, top5
  After every stage all images of each `val` are evaluated, inside a stage at `test_interval`: top-1, top-5 and loss;
  mAP of images with several labels. `stagerun eval --per-class` has the confusion matrix.
  See `stagerun help Data.val`, `stagerun help test_interval`, `stagerun help test_transform_param`, `stagerun help
  losses`, `stagerun eval --help`.

gpu, gpus, workers, nodes, machines, cluster, slurm, cuda, cpu, mps
  How many workers there are is not part of a schedule: `stagerun run DIR --nproc N`, `--hosts`, or `stagerun sbatch`.
  See `stagerun help many-machines`, `stagerun help batch_size`, `stagerun run --help`, `stagerun sbatch --help`,
  `stagerun rehearse --help`.

inference, predict, deploy, onnx, torchvision, safetensors, state dict, trust code
  `stagerun predict SNAPSHOT FOLDER` says what is in pictures. `stagerun export` writes the network for torch,
  safetensors or ONNX, and says how it is loaded. `--trust-code` lets both run the Python that makes a network.
  See `stagerun help reports`, `stagerun predict --help`, `stagerun export --help`.

early stopping, patience
  `early_stop { metric: TOP1 patience_epoch: 3 }` ends a stage where an evaluation inside it gets no better. `plateau`
  lowers the rate where the loss stands still.
  See `stagerun help early_stop`, `stagerun help losses`.

custom loss, distillation, multi label, bce, focal loss, own loss, loss function, cross entropy, focal, multilabel, several labels, knowledge distillation
  `loss` says what a stage minimises: each class by itself, what another stage teaches, or a function of your own.
  `labels` names a file for images with several labels.
  See `stagerun help losses`, `stagerun help loss`, `stagerun help Source.labels`.

class weights, class weight, weighted loss, imbalance, imbalanced, oversampling, sampler, weighted sampling
  `class_weight` is a factor on the loss of each class. `sampling` says how often the images of each class come:
  `BALANCED`, each as often.
  See `stagerun help class_weight`, `stagerun help sampling`, `stagerun help your-own-images`.

regression, segmentation, detection
  Not possible today: each image is a picture with one or more classes.
  See `stagerun help losses`, `stagerun help Source.labels`.

own network, own model, custom network, architecture, dropout, network, timm, torch, pytorch, nn.module, module, batchnorm, batch norm, bn, stochastic depth, drop path
  `model { name: "mynet.py:build" args { dropout: 0.1 } }` is a function in a file beside the schedule. `name` takes a
  function of a package, `timm/NAME`, and networks of a list with their published dropout, too. `caffe_net` takes a net
  of Caffe's.
  See `stagerun help your-own-network`, `stagerun help Model.name`, `stagerun help caffe_net`.

class folders, class folder, imagefolder, folder of images, image folder, folder
  A folder that has a folder of images for each class. `source` may be one, of 100,000 images at most: `run` imports it.
  `stagerun data import FOLDER LMDB` does that beforehand, for any number.
  See `stagerun help your-own-images`, `stagerun help Source.source`, `stagerun data import --help`.

caffe weights, caffemodel, solverstate file
  `weights { file: "x.caffemodel" }` in a stage starts from them, by the names of layers; `solverstate: "x.solverstate"`
  goes on where Caffe stopped. `stagerun export SNAPSHOT --caffemodel FILE` writes them.
  See `stagerun help caffe`, `stagerun help Solver.weights`, `stagerun help Solver.solverstate`, `stagerun export
  --help`.

notebook, jupyter, script, python api, api
  `import stagerun` in a script or notebook: `load`, `plan`, `run` as an iterator of events, `report`, `Snapshot`.
  See `stagerun help library`.

reproducible, reproducibility, deterministic, random
  The same schedule gives the same bits, also after a kill, and on any number of workers with `determinism: ELASTIC`.
  A Python file draws from torch's random numbers, or from the generator that it is given.
  See `stagerun help Schedule.seed`, `stagerun help determinism`, `stagerun help running-and-resuming`.

mixed precision, amp, half precision, float16
  `precision: BF16` computes the network in bfloat16; weights and sums stay in float32. There is no loss scaling.
  See `stagerun help Solver.precision`, `stagerun help compile`.

colour, color, grey, gray, grayscale, rgb, bgr
  `channels` says whether a network takes images in colour or grey ones, `channel_order` whether it gets R, G, B.
  See `stagerun help channels`, `stagerun help channel_order`, `stagerun help mean_value`.

overfitting, overfit, regularisation, regularization
  More augmentation, weight decay, label smoothing, dropout; or an earlier end.
  See `stagerun help transform_param`, `stagerun help weight_decay`, `stagerun help label_smoothing`, `stagerun help
  mixup_alpha`, `stagerun help early_stop`.

ema, averaged weights, swa, moving average
  `ema_decay` keeps an average of the weights, which `eval --ema` takes. An ensemble may average those of several
  stages.
  See `stagerun help ema_decay`, `stagerun help Ensemble`, `stagerun eval --help`.

gradient clipping, clip, clipping
  `clip_gradients` is the largest norm that a gradient keeps.
  See `stagerun help clip_gradients`.
"""

TOPICS = {entry.split(",")[0].split("\n")[0]: entry for entry in _TEXT.strip().split("\n\n")}
WORDS = {word: topic for topic, entry in TOPICS.items() for word in entry.split("\n")[0].split(", ")}


def topic_text(name: str) -> str:
    """What there is to say about a word or a few; '' where it is unknown."""
    topic = WORDS.get(" ".join(name.lower().replace("-", " ").replace("_", " ").split()), "")
    return "\n".join([topic, *TOPICS[topic].split("\n")[1:]]) if topic else ""
