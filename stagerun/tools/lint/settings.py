"""Rules about lengths, snapshots, fields, images and what workers send each other. Some read the side files of LMDBs on this machine."""

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from stagerun.base.errors import Level, Span
from stagerun.base.recipe import (
    CLEARED,
    ChannelOrder,
    Determinism,
    Memory,
    Method,
    OnNan,
    Origin,
    ParamKind,
    Transform,
)
from stagerun.base.text import MOST_LISTED, count, listed
from stagerun.base.weights import Preprocessing
from stagerun.base.weights import place_of as weights_of
from stagerun.language.networks import known_of
from stagerun.language.rules.rule import Found, Rule
from stagerun.language.values import text as canonical
from stagerun.plan.described import unread
from stagerun.schedule import SOLVER_TYPES, fields_read, parting
from stagerun.system.image_sets import known as side_file
from stagerun.tools.lint.rates import LARGE, Doubts, StageFacts, doubt, each

# -- lengths and snapshots

UNSAVED = 8_000_000  # images that a kill may cost: six epochs of ImageNet, more than two hours of a GPU at a thousand a second


def unsaved_work(it: StageFacts) -> Doubts:
    """Every stage ends with a snapshot. An interval that the stage inherits may be longer than the stage."""
    solver, longest = it.solver, max(b - a for a, b in itertools.pairwise(it.points))
    lost = min(solver.snapshot or longest, longest) * solver.batch_size
    if lost > UNSAVED:
        why = f"one snapshot in {solver.snapshot} iterations" if solver.snapshot else "no snapshot is taken inside it"
        text = f"a kill in {it.name} may cost {lost:,} images, {lost / it.train.images:.3g} epochs: {why}"
        hint = f"`snapshot: {max(1, UNSAVED // 4 // solver.batch_size)}` costs {UNSAVED // 4:,} at most"
        yield "snapshot max_iter", text, hint
    elif solver.snapshot > solver.max_iter and it.stage.origins["solver.snapshot"].layer != "schedule":
        text = f"`snapshot` {solver.snapshot} is never due: {it.name} has {solver.max_iter} iterations"
        yield "snapshot", text, "every stage ends with a snapshot"


def no_snapshot(stages: Sequence[StageFacts]) -> Found:
    whole = [it for it in stages if it.stage.enabled and not it.solver.snapshot and len(it.points) == 2]
    if whole:
        back = "; so does `on_nan: ROLLBACK`" if any(it.solver.on_nan is OnNan.ROLLBACK for it in whole) else ""
        names = listed([it.stage.name for it in whole], MOST_LISTED)
        text = f"no snapshot inside {names}: a kill costs the stage from its start (`snapshot`){back}"
        yield whole[0].span("max_iter"), text, ""


def no_test(stages: Sequence[StageFacts]) -> Found:
    stage = stages[0].stage
    if not stages[0].schedule.validation_sets:
        text = "`data.val` is missing: nothing says how good the network is"
        hint = "write `val { source: ... images: ... }` in `data`"
        yield stage.written("data.train.source") or stage.span, text, hint


def same_stage(stages: Sequence[StageFacts]) -> Found:
    """Compare sets and files as well: an identity lacks them."""
    firsts: dict[str, str] = {}
    for it in stages:
        if it.stage.enabled:
            files = it.train.path, it.solver.start, it.solver.transform, it.solver.loss
            key = f"{it.stage.parent, it.stage.average, it.start, it.stage.identity, files}"
            if (first := firsts.setdefault(key, it.name)) != it.name:
                hint = "is a value missing? `random_seed` draws other images and weights"
                yield it.stage.span, f"{it.name} trains exactly what {first} trains", hint


# -- fields


def unread_field(stages: Sequence[StageFacts]) -> Found:
    """A line with a field that every stage with this line ignores. `--set` writes no line."""
    unread_by = {it.name: {f"solver.{field}": why for field, why in unread(it.stage)} for it in stages}
    lines: dict[Span, list[tuple[StageFacts, str, Origin]]] = {}
    for it in stages:
        for key, origin in it.stage.origins.items():
            if origin.span is not None and origin.layer != "--set":
                lines.setdefault(origin.span, []).append((it, key, origin))
    for span, readers in lines.items():
        if all(key in unread_by[it.name] for it, key, _ in readers):
            it, key, origin = readers[0]
            why, twin = unread_by[it.name][key], origin.text.lstrip("[").partition(": ")[0]  # perhaps in epochs
            name = twin if twin.endswith("_epoch") else key.removeprefix("solver.")
            text = f"`{name}` is not read in {it.name}{why if why.startswith(':') else f',{why}'}"
            yield span, text, "take it out, or is another policy or type meant?"


def unread_in_param(it: StageFacts) -> Doubts:
    adapts, auto = "adapt" in fields_read(it.solver), it.solver.local_lr_auto
    for rule in it.solver.param:
        if not adapts and not rule.adapt:
            text = f"`adapt` of param `{rule.name}` is not read by type {it.solver.type}"
        elif adapts and auto and rule.adapt and rule.lr_mult not in (0, 1):
            text = f"`lr_mult` {rule.lr_mult:g} of param `{rule.name}` is replaced by local_lr_auto"
        else:
            continue
        yield "param", f"{text} in {it.name}", "take it out"


def idle_clear(stages: Sequence[StageFacts]) -> Found:
    for key, origin in (pair for it in stages for pair in it.stage.origins.items()):
        if key.startswith(CLEARED) and origin.span:
            yield origin.span, f"`clear: {origin.text}` takes nothing away: nothing like that is inherited", ""


SGD_DECAY, SGD_RATE = 5e-4, 0.02  # a decay of SGD's or less, a rate of SGD's or more
MOST_OF_FIRST = 0.1  # a larger share of a stage's first weights in the average of `ema_decay` is worth a look


def doubtful_value(it: StageFacts) -> Doubts:
    solver, kind = it.solver, SOLVER_TYPES[it.solver.type]
    meaning, usual = kind.momentum_is or ("", 0.9)
    if "momentum" in kind.reads and not solver.momentum and it.stage.written("solver.momentum") is None:
        what = f"and {meaning} of type {solver.type}: " if meaning else ""
        second = "  momentum2: 0.999" if "momentum2" in kind.reads else ""
        hint = f"write `momentum: {usual}{second}`; Caffe's default is 0, and `momentum: 0` says that it is meant"
        yield "type batch_size", f"{it.name}: momentum is 0, {what}{usual} is usual", hint
    if solver.type == "AdamW" and 0 < solver.weight_decay <= SGD_DECAY:
        text = f"{it.name}: weight_decay {solver.weight_decay:g} is for SGD, whose learning rate is a hundred times AdamW's"
        hint = "`weight_decay: 0.05` is usual for AdamW, with `param { kind: BIAS_AND_NORM decay_mult: 0 }`"
        yield "weight_decay", text, hint
    if solver.type in ("Adam", "AdamW") and it.peak >= SGD_RATE:
        text = f"{it.name}: a learning rate of {it.peak:.4g} is for SGD: {solver.type} moves a weight by about as much"
        yield "base_lr", text, "`base_lr: 0.001` is usual, less from trained weights"
    updates = solver.max_iter // solver.ema_interval
    first = 0.0 if solver.ema_decay is None else solver.ema_decay**updates
    if first > MOST_OF_FIRST and updates:
        power = f"({solver.ema_decay:g}^{updates})"
        text = f"{it.name}: {100 * first:.3g} % of the average at its end {power} are the weights that it starts with"
        yield "ema_decay type", text, "take a smaller decay, or leave the average out"


def _decays_norm(it: StageFacts) -> bool:
    """Return whether weight decay is on scales and shifts of BatchNorm where that matters: all large-batch recipes since Goyal et al.
    (arXiv:1706.02677) leave it out, and a layer-wise rate is meant for maps alone. As in training, the first `param` rule that fits counts;
    a rule that exempts some of them by name is taken for meant."""
    solver = it.solver
    large = solver.batch_size >= LARGE or solver.type in ("LARS", "LAMB") or solver.local_lr_auto
    if not large or not solver.weight_decay or known_of(it.stage.model).batch_norm is None:
        return False
    fitting = (rule for rule in solver.param if rule.kind not in (ParamKind.BIAS, ParamKind.WEIGHT))
    return next((rule.decay_mult != 0 for rule in fitting if rule.decay_mult == 0 or rule.name == "*"), True)


# -- images: the numbers that pixels become, and sizes

_OF_BYTES = "write `mean_value` and `std_value` of pixels of 0 to 255"
IMAGENET = (103.53, 116.28, 123.675)  # mean of its pixels: B, G, R


def _ranges(transform: Transform, channels: int) -> list[tuple[float, float]]:
    """Return what the pixels 0 and 255 of each channel become."""
    mean, std = ((v * channels)[:channels] for v in (transform.mean_value or (0.0,), transform.std_value or (1.0,)))
    return [((0 - m) * transform.scale / s, (255 - m) * transform.scale / s) for m, s in zip(mean, std, strict=True)]


def _alike(some: Iterable[tuple[float, float]], others: Iterable[tuple[float, float]]) -> bool:
    """Return whether pixels become the same numbers, within 1 %."""
    pairs = zip(some, others, strict=True)
    return all(abs(x - y) <= 0.01 * abs(p[1] - p[0]) for p, q in pairs for x, y in zip(p, q, strict=True))


def other_numbers(it: StageFacts) -> Doubts:
    """The network takes other numbers for the same pixel than in its evaluation, or in its parent."""
    trained, channels, parent = it.solver.transform, it.stage.model.channels, it.parent
    others = [("an evaluation", it.solver.test_transform)] if it.stage.data.val else []
    if parent is not None and parent.stage.model.channels == channels:
        others.append((parent.name, parent.solver.transform))
    for who, other in others:
        near = _alike(_ranges(trained, channels), _ranges(other, channels))
        same_order = channels == 1 or trained.channel_order == other.channel_order
        if not (near and same_order and trained.mean_file == other.mean_file):
            names = ("channel_order", "mean_value", "std_value", "scale", "mean_file")
            pairs = ((name, canonical(getattr(trained, name)), canonical(getattr(other, name))) for name in names)
            differing = [f"{name} ({a}, {b})" for name, a, b in pairs if a != b]
            hint = "write the same values in both, or once in the `solver` of schedule.prototxt"
            yield "transform_param.", f"{it.name} and {who} differ in {listed(differing)}", hint
            return


def unscaled(it: StageFacts) -> Doubts:
    """Inputs that aren't scaled at all, or by values for pixels of 0 to 1, or twice."""
    transform = it.solver.transform
    ranges, mean = _ranges(transform, it.stage.model.channels), transform.mean_value
    span, small = max(abs(b - a) for a, b in ranges), any(mean) and all(0 <= value <= 1 for value in mean)
    raw = span == 255 and not any(mean) and transform.mean_file is None
    if small or raw or span > 255 or span < 0.1:
        name, values = ("mean_value", mean) if small else ("std_value", transform.std_value)
        usual = _usual(it)
        hint = f"write `{usual}`" if usual else f"{_OF_BYTES}; `stagerun data info LMDB` shows them"
        if values and (small or span > 255):
            of_one = [("mean_value", mean if small else ()), ("std_value", transform.std_value if span > 255 else ())]
            imagenet = len(mean) == 3 and all(abs(255 * a - b) < 2 for a, b in zip(mean, IMAGENET[::-1], strict=True))
            order = "channel_order: RGB  " if small and imagenet else ""
            hint = f"written for pixels of 0 to 1? Then write `{order}{_numbers(of_one, 255)}`"
        low, high = min(map(min, ranges)), max(map(max, ranges))
        text = f"pixels of 0 to 255 become inputs of {low:.4g} to {high:.4g} in {it.name}"
        yield f"transform_param.{name} transform_param.scale", text, hint


def _numbers(fields: Iterable[tuple[str, Iterable[float]]], times: float = 1) -> str:
    texts = ((name, ", ".join(f"{times * value:.6g}" for value in values)) for name, values in fields)
    return "  ".join(f"{name}: [{text}]" for name, text in texts if text)


def _usual(it: StageFacts) -> str:
    """Return the normalisation that published weights need, else that of the stage's images; '' if both are unknown."""
    if (published := _published(it)) is not None:
        return published.numbers
    images = [(round(mean, 1), round(deviation, 1)) for mean, deviation in _statistics(it)]
    return _numbers(
        [("mean_value", (mean for mean, _ in images)), ("std_value", (deviation for _, deviation in images))]
    )


def _is_published(it: StageFacts) -> bool:
    return it.stage.model.channels == 3 and weights_of(it.weights).published


def _published(it: StageFacts) -> Preprocessing | None:
    return it.published(it.weights) if _is_published(it) else None


def channel_order(it: StageFacts) -> Doubts:
    """Weights of torchvision or timm, which are for R, G, B, or ImageNet's mean, in the other order."""
    mean, published = it.solver.transform.mean_value, _is_published(it)
    rgb = it.solver.transform.channel_order is ChannelOrder.RGB
    usual, order = (IMAGENET, "R, G, B") if rgb else (IMAGENET[::-1], "B, G, R")
    hint = "write `channel_order: RGB`, and mean and deviation in that order"
    if published and not rgb:
        text = f"{it.name} gives `{it.weights}` B, G, R; it was trained on R, G, B"
        yield "transform_param.channel_order transform_param.mean_value", text, _as_published(_published(it), hint)
    elif not published and len(mean) == 3 and all(abs(a - b) < 2 for a, b in zip(mean, usual, strict=True)):
        text = f"`mean_value` of {it.name} is ImageNet's in the other order: its channels are {order}"
        hint = "write `mean_value` the other way round" if rgb else hint
        yield "transform_param.channel_order transform_param.mean_value", text, hint


def _as_published(how: Preprocessing | None, unknown: str = "") -> str:
    if how is None:
        return unknown
    sizes = f"`crop_size: {how.crop}` in training, in test_transform_param `{how.test_size}`"
    return f"write `{how.numbers}` in both transforms; published sizes: {sizes}"


def published_numbers(it: StageFacts) -> Doubts:
    """Weights of torchvision or timm with another mean or deviation than theirs."""
    transform, published = it.solver.transform, _published(it)
    if published is None or transform.channel_order is not ChannelOrder.RGB or any(unscaled(it)):
        return
    theirs = replace(transform, mean_value=published.mean, std_value=published.std, scale=1.0)
    if transform.mean_file or not _alike(_ranges(theirs, 3), _ranges(transform, 3)):
        text = f"{it.name} gives `{it.weights}` other numbers for a pixel than those that it was trained on"
        yield "transform_param.mean_value transform_param.std_value", text, _as_published(published)


def _statistics(it: StageFacts) -> list[tuple[float, float]]:
    """Return mean and deviation of all training pixels by channel, in the stage's order, from the side file; empty where it is missing."""
    facts, _ = side_file(it.schedule.lmdb(it.train))
    with suppress(KeyError, TypeError, ValueError):
        pairs = [(float(m), float(d)) for m, d in zip(facts["mean_bgr"], facts["deviation_bgr"], strict=True)]
        return pairs[:: -1 if it.solver.transform.channel_order is ChannelOrder.RGB else 1]
    return []


OFF = 3.0  # as many times the images' own deviation, or a part as small, is worth a look


def far_mean(it: StageFacts) -> Doubts:
    """A mean more than a standard deviation off the mean of all pixels, or another deviation. Weights from elsewhere bring theirs."""
    transform = it.solver.transform
    if it.weights or any(unscaled(it)) or not (transform.mean_value or transform.std_value):
        return
    images, channels = _statistics(it), it.stage.model.channels
    images *= channels if len(images) == 1 else 1
    means, stds = ((values * channels)[:channels] for values in (transform.mean_value, transform.std_value))
    far = bool(means) and any(abs(v - m) > d for v, (m, d) in zip(means, images, strict=False))
    off = (abs(v / transform.scale) / max(d, 1e-9) for v, (_, d) in zip(stds, images, strict=False))
    outside = any(not 1 / OFF <= ratio <= OFF for ratio in off)
    if len(images) == channels and (far or outside):
        name = "mean_value" if far else "std_value"
        text = f"`{name}` of {it.name} is far from the {'mean' if far else 'deviation'} of its images"
        yield f"transform_param.{name}", text, f"write `{_usual(it)}`"


@lru_cache(maxsize=16)
def _shared(train: str, val: str, *fingerprints: object) -> tuple[int, int]:
    """Return how many of the first records of `val` are records of `train`, and how many were looked at, by the digests in their side files."""
    with suppress(ValueError):  # a side file that is written at this moment
        (_, (tested,)), (_, (trained,)) = side_file(val, "digests", most=2000), side_file(train, "digests")
        seen = set(zip(trained[::2], trained[1::2], strict=True))  # a digest is two numbers of 32 bits
        pairs = list(zip(tested[::2], tested[1::2], strict=True))
        return sum(pair in seen for pair in pairs), len(pairs)
    return 0, 1


def same_images(stages: Sequence[StageFacts]) -> Found:
    """Images of training in the first validation set; a further one may be meant to show the training accuracy."""
    looked_at = set[tuple[Span, str, str]]()
    for it, val in [(one, val) for one in stages for val in one.stage.data.val[:1]]:
        span, train, tested = it.stage.written("data.val.source") or it.stage.span, it.train.path, val.path
        if (span, train, tested) in looked_at:
            continue
        looked_at.add((span, train, tested))
        folders = it.schedule.lmdb(it.train), it.schedule.lmdb(val)
        shared, of = 1, 1
        if folders[0] != folders[1]:
            prints = [side_file(folder)[0].get("fingerprint") for folder in folders]
            shared, of = _shared(*folders, *prints) if all(prints) else (0, 1)
        if shared:
            which = "the images" if shared == of else f"{shared} of {of} images"
            text = f"{which} of `data.val` are in `data.train` of {it.name}, too: accuracy on them says little"
            yield span, text, "evaluate on images that it never trains on"


def _resizes(transform: Transform) -> bool:
    return bool(transform.random_resize or transform.random_aspect_ratio or transform.random_resized_crop)


def other_sizes(it: StageFacts) -> Doubts:
    """Things are larger or smaller in an evaluation than in training. Images whose stored size fits need no resizing."""
    train, test = it.solver.transform, it.solver.test_transform
    if not it.stage.data.val or not train.crop_size or not test.crop_size:
        return
    if test.crop_size < train.crop_size:
        text = f"{it.name} trains on {train.crop_size} x {train.crop_size} pixels, and is evaluated on {test.crop_size}"
        yield "transform_param.crop_size", text, "an evaluation has as many pixels or more"
    elif _resizes(train) != _resizes(test):
        one, other, crop, source = "training", "an evaluation", test.crop_size, it.stage.data.val[0]
        if _resizes(test):
            one, other, crop, source = "an evaluation", "training", train.crop_size, it.train
        wanted = crop * (test.random_resize.min_size / test.crop_size if test.random_resize else 8 / 7)
        _, sizes = side_file(it.schedule.lmdb(source), "heights", "widths", most=100)
        sides = sorted(map(min, *sizes)) if sizes else []
        if not sides or not 0.75 < sides[len(sides) // 2] / wanted < 1.34:
            cut = f"cuts {crop} x {crop} pixels out of them as they are stored"
            hint = f"resize in both (`random_resize_param`), or store images with a shorter side of about {wanted:.0f}"
            yield "transform_param.crop_size", f"{one} of {it.name} resizes images, and {other} {cut}", hint


# -- what workers send each other

# Methods that leave out or distort the same part of the gradient again and again where nothing remembers it: arXiv:1809.07599, 1905.13727.
_FORGETFUL = (Method.TOP_K, Method.THRESHOLD, Method.POWER_SGD)


def compress_more(it: StageFacts) -> Doubts:
    """Messages that take as many bytes as dense gradients. A message, a share s of the vector, goes to each other worker: s (W-1), where a
    dense sum takes 2 (W-1)/W. So s = 1 is too much for two workers, and less for more. With `determinism: ELASTIC` each of L logical workers
    sends one, s (W-1) L/W; dense sums need more than a ring's bytes, up to twice, where numbers are not powers of 2."""
    how, senders = it.solver.compress, it.solver.logical_workers
    if how is None or senders == 1:
        return
    ratio = how.ratio or 0.0
    # TOP_K names its numbers by a byte or more each, or by a bit for every number.
    shares = {Method.TOP_K: ratio + min(ratio / 4, 1 / 32), Method.RANDOM_K: ratio, Method.TERNGRAD: 1 / 16}
    elastic, times = it.schedule.determinism is not Determinism.FIXED, shares.get(how.method, 0.0)
    hint = "a smaller `ratio`, or remove `compress_param`"
    if elastic:
        times *= senders / 2
        hint = f"each of {senders} logical workers sends a message: a larger `device_batch_size` makes fewer"
    if times >= (2 if elastic else 1):
        text = f"{how.method.value} of {it.name} sends about {times:.3g} times the bytes of dense gradients"
        yield "compress_param.ratio compress_param.method", text, hint


def period_beyond(it: StageFacts) -> Doubts:
    sync = it.solver.sync
    if sync is not None and (sync.period or 0) > (left := it.solver.max_iter - parting(it.solver)):
        text = (
            f"`period` {sync.period} is never over: the replicas of {it.name} go apart for {count(left, 'iteration')}"
        )
        hint = f"they meet at the stage's end alone; `period: {left}` says the same"
        yield "sync_param.period", text, hint


def staleness_waits(it: StageFacts) -> Doubts:
    """Staleness is, with equal speeds, replicas - 1: while a replica computes, each of the others pushes once or more."""
    sync = it.solver.sync
    if sync is not None and sync.max_staleness is not None and sync.max_staleness < (stale := sync.replicas - 1):
        text = f"`max_staleness` {sync.max_staleness} keeps replicas of {it.name} waiting: "
        text += f"{sync.replicas} of equal speed make each other {stale} updates stale"
        yield "sync_param.max_staleness", text, f"write `max_staleness: {stale}` or more, or fewer `replicas`"


_UNREAD = "a field that the policy, or the type, of no stage that has it reads"
_DOUBTFUL = "a value that makes little of the solver type, or of an average of the weights"
RULES = (
    doubt(
        "decay-on-norm", "weight_decay",
        "weight_decay {it.solver.weight_decay:g} of {it.name} is on the scales and shifts of BatchNorm, too",
        "write `param {{ kind: NORM decay_mult: 0 }}`", _decays_norm,
        "a large batch with weight decay on BatchNorm",
    ),
    doubt(
        "batch-images", "batch_size",
        "an update of {it.name} takes {it.solver.batch_size} images, and its set has {it.train.images}",
        "a smaller `batch_size`, or is `images` of `data.train` wrong?",
        lambda it: it.solver.batch_size > it.train.images, "an update of more images than the set has",
    ),
    each("unsaved-work", unsaved_work, "a kill costs much, since snapshots are far apart"),
    Rule("no-snapshot", no_snapshot, Level.NOTE, "stages without a snapshot before their end"),
    Rule("unread-field", unread_field, Level.WARNING, _UNREAD),
    each("unread-field", unread_in_param, _UNREAD),
    Rule("idle-clear", idle_clear, Level.NOTE, "a path in `clear` that takes nothing away"),
    Rule("same-stage", same_stage, Level.WARNING, "a stage that trains exactly what another one trains"),
    doubt(
        "doubtful-value", "delta type", "{it.name}: delta is 0: a weight without a gradient divides 0 by 0",
        "is it meant?", lambda it: SOLVER_TYPES[it.solver.type].divides and it.solver.delta == 0, _DOUBTFUL,
    ),
    doubt(
        "doubtful-value", "ema_interval type",
        "{it.name}: ema_interval {it.solver.ema_interval} is never reached: the stage ends at {it.solver.max_iter}",
        "is it meant?", lambda it: it.solver.ema_decay is not None and it.solver.ema_interval > it.solver.max_iter,
        _DOUBTFUL,
    ),
    each("doubtful-value", doubtful_value, _DOUBTFUL),
    Rule("no-test", no_test, Level.WARNING, "images to evaluate with are missing"),
    each("other-numbers", other_numbers, "a network that takes other numbers than in its evaluation, or in its parent"),
    each("odd-range", unscaled, "images that nothing normalises, or mean_value and std_value for pixels of 0 to 1"),
    each("channel-order", channel_order, "weights or a mean for R, G, B where channels are B, G, R, or the reverse"),
    each("published-numbers", published_numbers, "published weights whose pixels are normalised in another way", looks=True),
    each("far-mean", far_mean, "a mean_value or std_value far from those of the images", looks=True),
    Rule("same-images", same_images, Level.WARNING, "images of training in an evaluation", looks=True),
    each("other-sizes", other_sizes, "images that are resized in training alone, or in an evaluation alone", looks=True),
    doubt(
        "compress-alone", "compress_param.method",
        "{it.name} compresses gradients, and its update is one device batch: one worker sends nothing",
        "a smaller `device_batch_size` gives more workers something to do; or remove `compress_param`",
        lambda it: (
            it.solver.logical_workers == 1
            and it.solver.compress is not None
            and it.solver.compress.method is not Method.NONE
        ),
        "gradients are compressed that one worker alone can't send",
    ),
    each("compress-more", compress_more, "compressed gradients that take more bytes than dense ones"),
    doubt(
        "no-memory", "compress_param.memory compress_param.method",
        "{it.solver.compress.method.value} of {it.name} has no memory: what it leaves out of a gradient is lost",
        "write `memory: RESIDUAL`, which costs no bytes; arXiv:1809.07599 and arXiv:1905.13727 show why",
        lambda it: (how := it.solver.compress) is not None and how.method in _FORGETFUL and how.memory is Memory.NONE,
        "a compression that loses the same part of each gradient, since it has no memory",
    ),
    doubt(
        "one-replica", "sync_param.replicas",
        "{it.name} has one replica, whose average it is itself: it trains as without `sync_param`",
        "write `replicas: 2` or more, or remove `sync_param`",  # with DILOCO it is Lookahead, arXiv:1907.08610
        lambda it: it.solver.sync is not None and it.solver.sync.replicas == 1 and it.solver.sync.outer is None,
        "a network whose replicas meet, and which has one",
    ),
    each("period-beyond", period_beyond, "replicas that meet at the stage's end alone, since their period is longer"),
    each("staleness-waits", staleness_waits, "a bound on staleness that keeps replicas of `ASYNC` waiting for each other"),
)  # fmt: skip
