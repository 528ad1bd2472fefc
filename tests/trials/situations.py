"""What happens to a trainer, and the verdict, which rests on exit codes, counts and the last weights alone."""

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import net
import numpy as np
import torch
from trial import STEPS, Invalid, Life, Trial

SLOW = {"slow": 0.03}  # seconds for each batch: what writes behind training has time to
FULL = {**SLOW, "limit_at": 300, "limit": 40_000}  # no file may become larger than that
WORSE = {"wrong_labels": True, "lr": 0.2}  # the validation loss grows
Make = Callable[..., Trial]


def distance(a: Trial, b: Trial) -> float:
    """The largest difference of two networks' values; infinite if the networks differ."""
    x, y = a.final()[0], b.final()[0]
    if not x or x.keys() != y.keys() or any(x[k].shape != y[k].shape for k in x):
        return math.inf
    each = [float(np.max(np.abs(x[k].astype(np.float64) - y[k].astype(np.float64)), initial=0)) for k in x]
    return math.inf if any(math.isnan(d) for d in each) else max(each)


def failed(trial: Trial, life: Life, names: tuple[str, ...] = ()) -> str | None:
    """The verdict on a life that ended with an error or began anew. Clear: it names a file of the checkpoint, or one of `names`."""
    if life.code == 124:
        return "hangs"
    if life.code:
        clear = re.search(re.escape(str(trial.out)) + r"/\S+\.\w", life.text) or any(
            name in life.text for name in names
        )
        return "refused with a clear message" if clear else f"failed ({life.error.split(':')[0].split('.')[-1][:40]})"
    return None


def judge(trial: Trial, life: Life, reached: int, straight: Trial, most: int = STEPS, tolerance: float = 1e-6) -> str:
    """The verdict on a life that goes on after `reached` updates. `most`: how many it may repeat."""
    whole = len(straight.only.rates)
    if verdict := failed(trial, life):
        return verdict
    if reached and len(life.rates) >= max(whole, trial.updates):
        return "lost (all: began anew)"
    repeated, far = reached + len(life.rates) - whole, distance(trial, straight)
    if far > tolerance and repeated < 0:
        return f"wrong ({-repeated} updates skipped)"
    if far > tolerance:
        total = f"{whole + repeated - reached % STEPS} updates instead of {whole}; " if repeated > most else ""
        return f"wrong ({total}weights differ by {far:.1g})"
    return f"lost ({repeated} updates)" if repeated > most else "ok" if far == 0 else f"ok (to {tolerance:g})"


def kill(trial: Trial, at: float, hooks: dict[str, Any] = SLOW, code: int = signal.SIGKILL) -> Life:
    """A life that is killed after so many epochs."""
    life = trial.life({**hooks, "kill_at": int(at * 200)})
    if life.code not in (-code, 128 + code):
        raise Invalid(f"should have been killed, ended with {life.code}: {life.error}")
    return life


def resume(make: Make, at: float = 1.2, hooks=SLOW, code=signal.SIGKILL, damage=None, most=STEPS, **settings) -> str:
    trial = make(**settings)
    straight = trial.straight()
    if len(straight.only.rates) == trial.updates and trial.settings["patience"]:
        raise Invalid("nothing stopped the undisturbed run")
    first = kill(trial, at, hooks, code)
    if damage is not None:
        trial.damage(damage)
    return judge(trial, trial.life(), len(first.rates), straight, most)


kill_in_save = partial(resume, at=9e9, hooks={**FULL, "limit_kills": True}, code=signal.SIGXFSZ, width=32)


def sigterm_save(make: Make) -> str:
    trial = make(width=32)
    straight = trial.straight()
    trial.start({"slow": 0.05})
    trial.until(lambda: len([line for line in trial.trace(1) if "ids" in line]) >= STEPS + 4)
    names = {(path, stat.st_mtime_ns) for path, stat in trial.files().items()}
    trial.until(lambda: {(path, stat.st_mtime_ns) for path, stat in trial.files().items()} != names)
    if trial.process.poll() is None:
        os.kill(trial.process.pid, signal.SIGTERM)
    first = trial.end()
    if first.code == 0 and len(first.rates) == trial.updates:
        raise Invalid("it had ended before the signal")
    return judge(trial, trial.life(), len(first.rates), straight)


def disk_full(make: Make) -> str:
    trial = make(width=32)
    straight = trial.straight()
    first = trial.life({**FULL, "limit_kills": False})
    if first.code == 0 and "File too large" not in first.text:
        return "wrong (exit 0, no word)"
    return judge(trial, trial.life(), len(first.rates), straight, 2 * STEPS)  # it may have trained on without saving


def processes(make: Make) -> str:
    trial = make(norm=False, elastic=True)
    straight = trial.straight()
    first = kill(trial, 1.2)
    return judge(trial, trial.life(processes=2), len(first.rates), straight, tolerance=1e-5)


def restored(whole: list[float], life: Life) -> int | None:
    """The update from which a life goes on, by its learning rate; None where that tells nothing."""
    return whole.index(life.rates[0]) if whole.count(life.rates[0]) == 1 else None


def rates(make: Make, at: float, **settings) -> str:
    trial = make(**settings)
    whole = trial.straight().only.rates
    if len(set(whole)) < 2:
        raise Invalid("the learning rate didn't change")
    first, life = kill(trial, at), trial.life()
    if verdict := failed(trial, life):
        return verdict
    if len(life.rates) >= trial.updates:
        return "lost (all: began anew)"
    begins = restored(whole, life)
    begins = len(whole) - len(life.rates) if begins is None else begins
    if begins > len(first.rates):
        return f"wrong ({begins - len(first.rates)} updates skipped)"
    if life.rates[: len(whole) - begins] != whole[begins:]:
        return f"wrong ({sum(a != b for a, b in zip(whole[begins:], life.rates, strict=False))} rates differ)"
    more = len(life.rates) - len(whole) + begins
    return f"wrong ({more} updates too many)" if more else "ok"


def best(make: Make) -> str:
    trial = make(epochs=4, best=True, **WORSE)
    straight = trial.straight()
    kill(trial, 2.2)
    life = trial.life()
    if verdict := failed(trial, life):
        return verdict
    a, b = straight.final()[1]["best"], trial.final()[1]["best"]
    return "ok" if a == b else f"wrong (best is that of epoch {b or 'none'}, not {a})"


def uneven(make: Make) -> str:
    straight = make(epochs=1, processes=2, elastic=True).straight()
    weights, facts = straight.final()
    network = net.build().eval()
    network.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()})
    images, labels = common.arrays("val")
    with torch.no_grad():
        outputs = network((torch.from_numpy(images).float()[:, None] - 73) / 90)
        exact = float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(labels)))
    return "ok" if abs(facts["loss"] - exact) < 2e-5 else f"wrong (loss {facts['loss']:.5f}, exact {exact:.5f})"


def clip(make: Make) -> str:
    trial = make(clip=0.05, norm=False, accumulate=2)
    return judge(trial, trial.life(), 0, trial.straight(accumulate=1, batch=40), 0, 1e-5)


def order(make: Make) -> str:
    trial = make(shuffle=True, stateful=True, every=7, schedule="cosine")
    straight = trial.straight()
    first, life = kill(trial, 1.55), trial.life()
    if verdict := failed(trial, life):
        return verdict
    if len(life.images) >= trial.updates:
        return "lost (all: began anew)"
    begins = restored(straight.only.rates, life)
    if begins is None or begins > len(first.images):
        return "wrong (batches skipped)"
    batches = first.images[:begins] + life.images
    if batches == straight.only.images:
        return "ok"
    counts = Counter(image for batch in batches for image in batch)
    if set(counts.values()) == {3} and len(counts) == 200:
        return "ok (in another order)"
    less, more = sum(n < 3 for n in counts.values()), sum(n > 3 for n in counts.values())
    return f"wrong (of 200 images in 3 epochs {less} too seldom, {more} too often)"


def draws(make: Make) -> str:
    """With both kinds of loaders that PyTorch's trainers offer; the better counts."""
    ways = [resume(make, shuffle=True, dropout=0.2, augment=True, stateful=stateful) for stateful in (False, True)]
    return "ok" if "ok" in ways else ways[0]


def other_network(make: Make) -> str:
    trial = make(width=8)
    kill(trial, 1.2)
    straight, life = trial.straight(width=12), trial.life(width=12)
    if verdict := failed(trial, life, ("size mismatch", "shape", "model.args")):
        return verdict
    anew = len(life.rates) >= trial.updates and distance(trial, straight) < 1e-6
    return "ok (trained anew)" if anew else "wrong (loaded a part of it)"


def nan(make: Make) -> str:
    trial = make(check_nan=True)
    straight, first = trial.straight(), trial.life({**SLOW, "nan_at": 300})
    if first.code == 0 and len(first.rates) >= trial.updates - 1:
        bad = any(np.isnan(v).any() for v in trial.final()[0].values())
        return "wrong (exit 0, weights are NaN)" if bad else "ok (left the batch out)"
    return "stopped, then " + judge(trial, trial.life(), len(first.rates), straight)


def two_runs(make: Make) -> str:
    trial = make()
    trial.start({"slow": 1.0})
    trial.until(lambda: len([line for line in trial.trace(1) if "ids" in line]) >= 2)
    process = trial.process
    second, alive = trial.life(), process.poll() is None
    first = trial.end(process, 1)
    if alive and (verdict := failed(trial, second, ("another run", "in use", "already"))):
        return verdict
    return (
        f"wrong (the first run fails: {first.error.split(':')[0][:40]})"
        if first.code
        else "wrong (both train and save)"
    )


def raised(make: Make) -> str:
    trial = make(epochs=2)
    straight, first = trial.straight(epochs=4), trial.life()
    return judge(trial, trial.life(epochs=4), len(first.rates), straight, 0)


truncated = partial(resume, at=2.2, damage=0.5, most=2 * STEPS, width=32)
VARIANTS = {
    "kill_epoch": resume,
    "kill_save": kill_in_save,
    "keep_one": partial(kill_in_save, keep=1),
    "truncated": truncated,
    "empty": partial(truncated, damage=0),
    "ema": partial(resume, ema=True),
    "rate_mid_epoch": partial(rates, at=1.55, every=7, schedule="cosine"),
    "plateau": partial(rates, at=3.2, epochs=6, schedule="plateau", **WORSE),
    "patience": partial(resume, at=3.2, epochs=8, patience=3, **WORSE),
}
ROWS = """
kill_epoch      SIGKILL just after an epoch's end                    verl-project/verl/issues/7401
sigterm_save    SIGTERM as a checkpoint is written                   NVIDIA-NeMo/Automodel/pull/3261
kill_save       killed in a write of the second checkpoint           Lightning-AI/pytorch-lightning/issues/688
keep_one        the same, one checkpoint kept                        huggingface/accelerate/issues/1163
truncated       newest checkpoint cut in half                        vllm-project/speculators/pull/739
empty           newest checkpoint empty                              tdrussell/diffusion-pipe/issues/159
disk_full       no room in a save; room at the next start            sml2h3/dddd_trainer/issues/36
processes       2 processes after a kill, 1 before                   ecmwf/WeatherGenerator/issues/280
ema             EMA after a kill                                     Megvii-BaseDetection/YOLOX/issues/1318
rate_mid_epoch  learning rates after a kill in mid-epoch             vllm-project/speculators/pull/900
plateau         counters of the plateau scheduler after a kill       huggingface/pytorch-image-models/pull/2756
patience        patience of early stopping after a kill              Lightning-AI/pytorch-lightning/issues/18727
best            best checkpoint after a kill                         keras-team/keras/issues/17012
uneven          101 images evaluated by 2 processes                  roboflow/rf-detr/issues/1507
clip            clipping 2 accumulated batches as one of twice the size  facebookresearch/lingua/pull/59
order           each image once an epoch after a kill in mid-epoch   huggingface/accelerate/pull/4233
draws           shuffling, augmentation, dropout after a kill        vllm-project/speculators/issues/1027
other_network   a checkpoint of another network                      hpcaitech/ColossalAI/issues/5492
nan             the loss of a batch is NaN                           Nerogar/OneTrainer/issues/1147
two_runs        two runs in one folder at once                       meta-pytorch/torchtune/issues/481
raised          epochs raised from 2 to 4 after the end              ultralytics/ultralytics/issues/802
"""
TABLE: dict[str, tuple[str, str, Callable[[Make], str]]] = {}
for _row in ROWS.strip().splitlines():
    _name, _words, _path = re.split("  +", _row)
    TABLE[_name] = (_words, _path, VARIANTS.get(_name) or globals()[_name])
