"""All of training in one file: what `stagerun run DIR` computes, without snapshots, launchers, workers and logs.

`train(stagerun.load(DIR))` trains one stage after the other, plainly. `stagerun run` comes to the same bits, however often it is killed: every weight,
buffer, momentum and average, and every figure of an evaluation (`tests/train/test_reference.py`). The story:

A schedule is a tree of stages. A stage starts from the seed, or from another stage after some iteration: it takes over that one's weights and its place
in the images, and its momentum if `carry` says so. An iteration is one update. Its `batch_size` images are cut into device batches, each one forward
and one backward pass. What these come to, gradients and BatchNorm's statistics, is added up; then weights and running statistics move once. All that
is random follows from the seed and a *position*, the number of images consumed so far: which image is next, where it is cut, how images are mixed,
what dropout drops. So no random state is remembered. Every `test_interval` iterations and at its end, a stage's weights and their running average are
evaluated. Left out: wings (compression, ASYNC, LOCAL, DILOCO, Caffe's nets), ensembles, and most of what only ImageNet's schedules use.
"""

import copy
import math
from fnmatch import fnmatchcase
from types import SimpleNamespace

import cv2
import lmdb
import numpy as np
import torch
import torch.nn.functional as F
from facade import Datum

from stagerun.models import build

ORDER, TRANSFORM, DROPOUT, MIX, SAMPLING, MEMBER = 1, 2, 3, 5, 7, 8  # what random numbers are for


# ---- Stages
def train(schedule, given=None):
    """Return `states` by stage and iteration (None: the end), each with weights, momentum, averaged weights and images consumed; `steps`, rates and
    losses; `scores`, images, top-1, top-5 and loss, of averaged weights where the key ends with True. `given`: tensors by `weights { file }`."""
    trained = SimpleNamespace(states={}, steps={}, scores={}, networks={})
    for stage in schedule.stages:
        solver, records, losses, best, best_at = stage.solver, read_lmdb(stage.data.train.path), [], -math.inf, 0
        model, parameters, norms, state = start_of(stage, trained, given)
        for done in range(1, solver.max_iter + 1):
            passes = []
            for first in range(state.position, state.position + solver.batch_size, solver.device_batch_size):
                positions = range(first, first + solver.device_batch_size)
                images, labels = batch_of(stage, solver.transform, records, positions, training=True)
                passes.append(pass_over(solver, model, parameters, norms, trained.networks, images, labels, first))
            total = add_up(passes, in_a_tree=schedule.determinism.name == "ELASTIC")
            losses.append(float(total["loss"]) / len(passes))
            lr = learning_rate(solver, done - 1, losses)
            move(solver, parameters, norms, total, state.optim, lr)
            for name, average in state.ema.items():
                average.lerp_(state.model[name], 1 - solver.ema_decay)
            state.position += solver.batch_size
            trained.steps[stage.name, done] = lr, losses[-1]
            if done in schedule.branch_points(stage.name):
                trained.states[stage.name, done] = copy.deepcopy(state)
            if done == solver.max_iter or (solver.test_interval and done % solver.test_interval == 0):
                top1 = 100 * evaluate(stage, state, done, trained)
                if solver.early_stop and top1 > best + solver.early_stop.min_delta:
                    best, best_at = top1, done
                if solver.early_stop and done - best_at >= solver.early_stop.patience_iter:
                    break
        trained.states[stage.name, done] = trained.states[stage.name, None] = copy.deepcopy(state)
        trained.networks[stage.name] = model.eval().requires_grad_(False)
    return trained


def start_of(stage, trained, given):
    """Return the network, its parameters and BatchNorm layers that are not frozen, and the state, which shares the network's tensors."""
    solver, model, parameters = stage.solver, network_of(stage), []
    state = SimpleNamespace(model=model.state_dict(), optim={}, ema={}, position=0)
    frozen = {name for pattern in solver.freeze for name in state.model if fnmatchcase(name, pattern)}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.BatchNorm2d)}
    for name, layer in layers.items():
        layer.train(f"{name}.running_mean" not in frozen)
    for name, tensor in model.named_parameters():
        kind = "NORM" if name.rpartition(".")[0] in layers else "BIAS" if name.endswith("bias") else "WEIGHT"
        rules = [rule for rule in solver.param if fnmatchcase(name, rule.name) and rule.kind.name in ("ANY", kind)]
        rule = rules[0] if rules else SimpleNamespace(lr_mult=1, decay_mult=1, adapt=True)
        tensor.requires_grad = rule.lr_mult != 0 and name not in frozen
        if tensor.requires_grad:
            parameters.append((name, tensor, rule))
    if stage.parent is not None:
        before = copy.deepcopy(trained.states[stage.parent, stage.parent_iter])
        model.load_state_dict(before.model)
        state.optim = before.optim if solver.carry_momentum else {}
        state.position = before.position if solver.carry_data else 0
    if solver.weights is not None:
        for name, tensor in given[solver.weights.file].items():
            if not any(fnmatchcase(name, pattern) for pattern in solver.weights.drop):
                state.model[name].copy_(tensor)
    if solver.ema_decay is not None:
        state.ema = {name: tensor.clone() for name, tensor in state.model.items() if tensor.is_floating_point()}
    return model, parameters, {name: layer for name, layer in layers.items() if layer.training}, state


def network_of(stage):
    torch.manual_seed(stage.solver.random_seed)
    return build(stage.model).to(memory_format=torch.channels_last)


# ---- An iteration: passes over device batches, and their sum
def pass_over(solver, model, parameters, norms, networks, images, labels, position):
    """Return by name the gradients of a device batch, what its BatchNorm layers left in their buffers (mean, unbiased variance), and its loss."""
    share, partners = 1.0, torch.arange(len(images))
    if solver.mixup_alpha:
        share, partners = mixup(solver.mixup_alpha, hashed(solver.random_seed, MIX, position), len(images))
        images.lerp_(images[partners], 1 - share)
    torch.manual_seed(hashed(solver.random_seed, DROPOUT, position) >> 1)
    logits = model(images)
    loss = share * loss_of(solver, logits, labels) + (1 - share) * loss_of(solver, logits, labels[partners])
    if solver.teacher is not None:  # Hinton, Vinyals and Dean, arXiv:1503.02531
        heat, weight = solver.loss.temperature, solver.loss.weight
        own, taught = (logits / heat).log_softmax(1), (networks[solver.teacher](images) / heat).log_softmax(1)
        loss = (1 - weight) * loss + weight * (heat**2 * F.kl_div(own, taught, reduction="batchmean", log_target=True))
    model.zero_grad()
    (loss / solver.logical_workers).backward()
    gradients = {name: tensor.grad for name, tensor, _ in parameters}
    statistics = {name: torch.stack([layer.batch_mean, layer.batch_var]).double() for name, layer in norms.items()}
    return {**gradients, **statistics, "loss": loss.detach().double()}


def loss_of(solver, logits, labels):
    if not solver.class_weight:
        return losses_of(solver, logits, labels, label_smoothing=solver.label_smoothing).mean()
    losses = losses_of(solver, logits, labels, label_smoothing=solver.label_smoothing, reduction="none")
    return (losses * torch.tensor(solver.class_weight)[labels]).mean()


def losses_of(solver, logits, labels, **options):
    if solver.loss is not None and solver.loss.type.name == "BINARY":
        wanted = F.one_hot(labels, logits.shape[1]).float()
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(1)
    return F.cross_entropy(logits, labels, **options)


def add_up(passes, in_a_tree):
    """Return the sum over an iteration: one after the other (FIXED), or in a tree of which workers can add up branches (ELASTIC)."""
    if len(passes) == 1:
        return passes[0]
    cut = 1 << (len(passes) - 1).bit_length() - 1 if in_a_tree else len(passes) - 1
    left, right = add_up(passes[:cut], in_a_tree), add_up(passes[cut:], in_a_tree)
    return {name: left[name] + right[name] for name in left}


# ---- The update
@torch.no_grad()
def move(solver, parameters, norms, total, optim, lr):
    """Update parameters and running statistics with an iteration's sums. `x.add_(y, alpha=a)` is x += a * y."""
    m, m2, caffe = solver.momentum, solver.momentum2, solver.momentum_form.name == "CAFFE"
    for name, w, rule in parameters:
        g, rate, decay, trust = total[name], lr * rule.lr_mult, solver.weight_decay * rule.decay_mult, 1.0
        if solver.type == "LARS" and rule.adapt and w.norm() > 0 and g.norm() > 0:  # arXiv:1708.03888
            trust = solver.local_gw_ratio * w.norm() / (g.norm() + decay * w.norm() + solver.delta)
        g = g.add(w, alpha=decay)
        slots = ("mean", "squares") if solver.type == "Adam" else ("steps",) if caffe else ("gradients",)
        v, *squares = (optim.setdefault(f"{slot}/{name}", torch.zeros_like(w)) for slot in slots)
        if solver.type == "Adam":  # arXiv:1412.6980
            t = int(optim.setdefault(f"t/{name}", torch.tensor(0)).add_(1))
            v.lerp_(g, 1 - m)
            squares[0].mul_(m2).addcmul_(g, g, value=1 - m2)
            w.addcdiv_(v, squares[0].sqrt() + solver.delta, value=-rate * math.sqrt(1 - m2**t) / (1 - m**t))
        elif solver.type == "Nesterov" and caffe:
            w.add_(v, alpha=m)
            w.add_(v.mul_(m).add_(g, alpha=rate), alpha=-(1 + m))
        elif solver.type == "Nesterov":
            w.add_(g.add(v.mul_(m).add_(g), alpha=m), alpha=-rate)
        elif caffe:
            w.sub_(v.mul_(m).add_(g * trust, alpha=rate))
        else:
            w.add_(v.mul_(m).add_(g) * trust, alpha=-rate)
    for name, layer in norms.items():
        # Caffe keeps A = f*A + x and c = f*c + 1 and reads A / c, which so moves to x by (1 - f) / (1 - f^t) of the way.
        layer.num_batches_tracked += 1
        f, t = layer.moving_average_fraction, int(layer.num_batches_tracked)
        mean, variance = (total[name] / solver.logical_workers).float()
        layer.running_mean.lerp_(mean, (1 - f) / (1 - f**t))
        layer.running_var.lerp_(variance, (1 - f) / (1 - f**t))


# ---- The learning rate. (1 + cos(pi * i / n)) / 2 and 1 - sqrt(i / n) are written so that they keep their digits near 0.
def learning_rate(s, iter, losses):
    """Return the rate of the update after `iter` updates. Policies count iterations from the stage's start, or from the end of its warm-up."""
    i, n = iter + s.policy_start_iter, s.max_iter
    if i < s.warmup_iter:
        return (i * s.base_lr + (s.warmup_iter - i) * s.warmup_start_lr) / s.warmup_iter
    if s.decay_from.name == "WARMUP_END":
        i, n = i - s.warmup_iter, n - s.warmup_iter
    return s.base_lr * plateau(s, losses) if s.lr_policy == "plateau" else POLICIES[s.lr_policy](s, i, n)


POLICIES = {
    "fixed": lambda s, i, n: s.base_lr,
    "step": lambda s, i, n: s.base_lr * s.gamma ** (i // s.stepsize),
    "multistep": lambda s, i, n: s.base_lr * s.gamma ** sum(value <= i for value in s.stepvalue),
    "exp": lambda s, i, n: s.base_lr * s.gamma**i,
    "exp_epoch": lambda s, i, n: s.base_lr * s.gamma ** (i / s.epoch_iter),
    "inv": lambda s, i, n: s.base_lr * (1 + s.gamma * i) ** -s.power,
    "poly": lambda s, i, n: s.base_lr * (1 - i / n) ** s.power,
    "poly_cyc": lambda s, i, n: s.base_lr * (1 - i / s.lr_iter) ** s.power,
    "sigmoid": lambda s, i, n: s.base_lr / (1 + math.exp(-s.gamma * (i - s.stepsize))),
    "linear": lambda s, i, n: s.end_lr + (s.base_lr - s.end_lr) * ((n - i) / n),
    "cosine": lambda s, i, n: s.end_lr + (s.base_lr - s.end_lr) * math.sin(math.pi * (n - i) / (2 * n)) ** 2,
    "one_minus_sqrt": lambda s, i, n: s.end_lr + (s.base_lr - s.end_lr) * ((n - i) / n / (1 + math.sqrt(i / n))),
    "piecewise_linear": lambda s, i, n: s.base_lr * np.interp(i, [k.iter for k in s.knot], [k.factor for k in s.knot]),
}


def plateau(s, losses):
    """Return gamma once for each time that the mean of the last losses has not fallen for a window of iterations."""
    drops, lowest, since = 0, math.inf, 0
    for i in range(s.warmup_iter, len(losses)):
        mean = math.fsum(losses[: i + 1][-s.average_loss :]) / min(i + 1, s.average_loss)
        if mean < lowest:
            lowest, since = mean, i
        if drops < len(s.plateau_winsize) and i >= since + s.plateau_winsize[drops]:
            drops, since = drops + 1, i
    return s.gamma**drops


# ---- Random numbers, and the order of the images
def hashed(number, *indices):
    """Return 64 random bits: output `index` of the generator splitmix64 seeded with `number`, which seeds the one for the next index."""
    for index in indices:
        number = (number + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
        number ^= number >> 31
    return number


def record_at(stage, records, position):
    """Each epoch has every image once, in an order of its own; with `sampling: BALANCED` each class as often, and its images in turn."""
    n, seed = len(records), stage.solver.random_seed
    epoch, place = divmod(position, n)
    if stage.solver.sampling.name == "UNIFORM":
        return permuted(hashed(seed, ORDER, epoch), place, n) if stage.data.shuffle else place
    classes = sorted({label for _, label in records})
    slots = [label for c, label in enumerate(classes) for _ in range(n // len(classes) + (c < n % len(classes)))]
    place = permuted(hashed(seed, SAMPLING, epoch), place, n)
    own = [i for i in range(n) if records[i][1] == slots[place]]
    again, turn = divmod(epoch * slots.count(slots[place]) + place - slots.index(slots[place]), len(own))
    return own[permuted(hashed(seed, MEMBER, slots[place], again), turn, len(own))]


def permuted(key, x, n):
    """Return x's place in the permutation of 0 .. n-1 that `key` names: a hash of each of its two digits moves the other, in turn."""
    a = max(16, math.isqrt(n - 1) + 1)
    b = max(16, -(-n // a))
    left, right = divmod(x, b)
    for step in range(0, 8, 2):
        left = (left + hashed(key, step, right)) % a
        right = (right + hashed(key, step + 1, left)) % b
    x = left * b + right
    return x if x < n else permuted(key, x, n)  # a * b is a little more than n


def mixup(alpha, seed, n):
    """Return an image's own share, drawn from Beta(alpha, alpha), and each one's partner (arXiv:1710.09412). Gamma: Marsaglia and Tsang, 2000."""

    def gamma(first):
        u = [((hashed(seed, place) >> 12) + 0.5) / 2**52 for place in range(first, first + 400, 4)]
        d = (alpha + 1 if alpha < 1 else alpha) - 1 / 3
        for u1, u2, u3 in zip(u[1::3], u[2::3], u[3::3], strict=True):
            normal = math.sqrt(-2 * math.log(u1)) * math.cos(2 * math.pi * u2)
            v = (1 + normal / math.sqrt(9 * d)) ** 3
            if v > 0 and math.log(u3) < normal**2 / 2 + d * (1 - v + math.log(v)):
                return d * v * u[0] ** (1 / alpha) if alpha < 1 else d * v

    x, y = gamma(5), gamma(7)
    return round(x / (x + y) * 2**24) / 2**24, torch.tensor(sorted(range(n), key=lambda i: hashed(seed, 4 + 2 * i)))


# ---- Images
def read_lmdb(path):
    """Return image, uint8 [height, width, channels] in B, G, R, and label of each record, in the order of the keys."""
    images = []
    with lmdb.open(path, readonly=True, lock=False) as file, file.begin() as transaction:
        for datum in (Datum.FromString(value) for _, value in transaction.cursor()):
            image = np.frombuffer(datum.data, np.uint8)
            if datum.encoded:
                image = np.atleast_3d(cv2.imdecode(image, cv2.IMREAD_UNCHANGED))
            else:
                image = image.reshape(datum.channels, datum.height, datum.width).transpose(1, 2, 0)
            images.append((image, datum.label))
    return images


def batch_of(stage, transform, records, positions, training):
    """Return images as the network takes them, and labels. An evaluation takes the records in order, and draws nothing."""
    records = [records[record_at(stage, records, p) if training else p] for p in positions]
    seeds = [hashed(stage.solver.random_seed, TRANSFORM, p) if training else None for p in positions]
    images = [transformed(transform, image, seed) for (image, _), seed in zip(records, seeds, strict=True)]
    return torch.stack(images).permute(0, 3, 1, 2), torch.tensor([label for _, label in records])


def transformed(t, image, seed):
    """Pad, cut, mirror and normalise an image, by numbers that follow from `seed`; without one it is cut from the centre."""
    border = "reflect" if t.pad_mode.name == "REFLECT" else "constant"
    image = np.pad(image, ((t.pad, t.pad), (t.pad, t.pad), (0, 0)), border)
    if t.random_resized_crop and seed:
        image = random_part(t.random_resized_crop, t.crop_size, image, seed)
    if t.crop_size:
        down, across = image.shape[0] - t.crop_size, image.shape[1] - t.crop_size
        top, left = (hashed(seed, 2) % (down + 1), hashed(seed, 3) % (across + 1)) if seed else (down // 2, across // 2)
        image = image[top : top + t.crop_size, left : left + t.crop_size]
    if t.mirror and seed and hashed(seed, 0) % 2:
        image = image[:, ::-1]
    if t.channel_order.name == "RGB":
        image = image[:, :, ::-1]
    x = torch.from_numpy(np.ascontiguousarray(image, np.float32)) - torch.tensor(t.mean_value or [0.0])
    x *= torch.tensor([t.scale / std for std in t.std_value or [1.0]])
    if t.cutout_size and seed:
        top, left = (hashed(seed, place) % (x.shape[0] - t.cutout_size + 1) for place in (4, 5))
        x[top : top + t.cutout_size, left : left + t.cutout_size] = 0
    return x


def random_part(how, side, image, seed):
    """Resize the first part of random area and proportions that fits to a square: torchvision's RandomResizedCrop."""
    height, width = image.shape[:2]
    for first in range(4, 4 + 4 * how.max_attempt, 4):
        share, place, top, left = (hashed(seed, number) for number in range(first, first + 4))
        area = how.min_area_ratio + (how.max_area_ratio - how.min_area_ratio) * ((share >> 11) / 2**53)
        ratio = how.min_aspect_ratio * (how.max_aspect_ratio / how.min_aspect_ratio) ** (place % 2**20 / 2**20)
        h, w = (round(math.sqrt(height * width * area * x)) for x in (1 / ratio, ratio))
        if h <= height and w <= width:
            break
    top, left = top % (height - h + 1), left % (width - w + 1)
    cv2.ipp.setUseIPP(False)
    mode = getattr(cv2, f"INTER_{how.interp_mode.name}")
    return np.atleast_3d(cv2.resize(image[top : top + h, left : left + w], (side, side), interpolation=mode))


# ---- Evaluation
def evaluate(stage, state, done, trained):
    """Return top-1 of the weights. All figures go to `trained.scores`, those of the averaged weights too."""
    solver, records = stage.solver, read_lmdb(stage.data.val[0].path)
    model = network_of(stage).eval().requires_grad_(False)
    for average in [False, True] if state.ema else [False]:
        model.load_state_dict({**state.model, **state.ema} if average else state.model)
        sums = [0, 0, 0, 0.0]
        for first in range(0, len(records), solver.test_batch_size):
            positions = range(len(records))[first : first + solver.test_batch_size]
            images, labels = batch_of(stage, solver.test_transform, records, positions, training=False)
            logits = model(images)
            right = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = losses_of(solver, logits, labels, reduction="none").double().sum()
            figures = len(labels), int(right[:, 0].sum()), int(right.any(1).sum()), float(loss)
            sums = [total + one for total, one in zip(sums, figures, strict=True)]
        trained.scores[stage.name, done, average] = sums[0], *(one / sums[0] for one in sums[1:])
    return trained.scores[stage.name, done, False][1]
