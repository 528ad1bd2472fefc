"""What happens to a trainer, and the verdict, which rests on exit codes, counts and the last weights alone."""

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from trial import STEPS, Invalid, Life, Peer, Trial

TABLE: dict[str, tuple[str, str, Callable[[Peer, Path], str]]] = {}
SLOW = {"slow": 0.03}  # seconds for each batch: what writes behind training has time to


def situation(words: str, link: str):
    def add(function: Callable[[Peer, Path], str]) -> Callable[[Peer, Path], str]:
        TABLE[function.__name__] = (words, link, function)
        return function

    return add


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest difference of two networks' values; infinite if the networks differ."""
    if not a or a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in a):
        return math.inf
    each = [float(np.max(np.abs(a[k].astype(np.float64) - b[k].astype(np.float64)), initial=0)) for k in a]
    return math.inf if any(math.isnan(d) for d in each) else max(each)


def refused(trial: Trial, life: Life, names: tuple[str, ...] = ()) -> str:
    """The verdict on a life that ended with an error. Clear: it names a file of the checkpoint, or the cause in one of `names`."""
    if life.code == 124:
        return "hangs"
    if re.search(re.escape(str(trial.out)) + r"/\S+\.\w", life.text) or any(name in life.text for name in names):
        return "refused with a clear message"
    return f"failed ({life.last_line.split(':')[0].split('.')[-1].strip('│ ')[:40]})"


def judge(trial: Trial, life: Life, reached: int, straight: Trial, most: int, tolerance=1e-6) -> str:
    """The verdict on a life that goes on after `reached` updates. `most`: how many it may repeat."""
    whole = len(straight.only.rates)
    if life.code:
        return refused(trial, life)
    repeated = reached + len(life.rates) - whole
    if reached and len(life.rates) >= max(whole, trial.updates):
        return "lost (all: began anew)"
    far = distance(trial.final(), straight.final())
    if far > tolerance:
        if repeated < 0:
            return f"wrong ({-repeated} updates skipped)"
        total = f"{whole + repeated - (reached % STEPS)} updates instead of {whole}; " if repeated > most else ""
        return f"wrong ({total}weights differ by {far:.1g})"
    if repeated > most:
        return f"lost ({repeated} updates)"
    return "ok" if far == 0 else f"ok (to {tolerance:g})"


def killed(trial: Trial, at: int, more=SLOW, code=-signal.SIGKILL, **changes) -> Life:
    life = trial.life({**more, "kill_at": at}, **changes)
    if life.code not in (code, 128 - code):
        raise Invalid(f"should have been killed, ended with {life.code}: {life.last_line}")
    return life


def kill_and_resume(peer: Peer, folder: Path, at=1.2, most=STEPS, **settings) -> str:
    trial = Trial(peer, folder / "trial", **settings)
    straight = trial.straight()
    first = killed(trial, int(at * 200))
    return judge(trial, trial.life(), len(first.rates), straight, most)


@situation("SIGKILL just after an epoch's end", "verl-project/verl/issues/7401")
def kill_epoch(peer, folder):
    return kill_and_resume(peer, folder)


@situation("SIGTERM while a checkpoint is written", "NVIDIA-NeMo/Automodel/pull/3261")
def sigterm_save(peer, folder):
    trial = Trial(peer, folder / "trial", width=32)
    straight = trial.straight()
    run = trial.start({"slow": 0.05})
    run.until(lambda: run.updates() >= STEPS + 4)
    before = listing(trial.out)
    run.until(lambda: listing(trial.out) != before)
    if run.process.poll() is None:
        os.kill(run.process.pid, signal.SIGTERM)
    first = run.wait()
    if first.code == 0 and len(first.rates) == 3 * STEPS:
        raise Invalid("it had ended before the signal")
    return judge(trial, trial.life(), len(first.rates), straight, STEPS)


def listing(folder: Path) -> set[tuple[str, int]]:
    """Names and sizes in a folder, apart from logs that grow all the time."""
    found = set()
    for path in folder.rglob("*"):
        try:
            if path.is_file() and path.suffix not in (".jsonl", ".csv", ".log") and "lives" not in path.parts:
                found.add((str(path), path.stat().st_mtime_ns))
        except OSError:
            pass
    return found


def kill_in_save(peer: Peer, folder: Path, **settings) -> str:
    trial = Trial(peer, folder / "trial", width=32, **settings)
    straight = trial.straight()
    first = killed(trial, 10**9, {**SLOW, "limit_at": 300, "limit": 40_000, "limit_kills": True}, -signal.SIGXFSZ)
    return judge(trial, trial.life(), len(first.rates), straight, STEPS)


@situation("killed in the middle of a write of the second checkpoint", "Lightning-AI/pytorch-lightning/issues/688")
def kill_save(peer, folder):
    return kill_in_save(peer, folder)


@situation("the same, with one checkpoint kept: is the old one deleted first?", "huggingface/accelerate/issues/1163")
def keep_one(peer, folder):
    return kill_in_save(peer, folder, keep=1)


def damaged(peer: Peer, folder: Path, part: float) -> str:
    trial = Trial(peer, folder / "trial", width=32)
    straight = trial.straight()
    first = killed(trial, 440)
    trial.damage(part)
    return judge(trial, trial.life(), len(first.rates), straight, 2 * STEPS)


@situation("newest checkpoint cut in half", "vllm-project/speculators/pull/739")
def truncated(peer, folder):
    return damaged(peer, folder, 0.5)


@situation("newest checkpoint empty", "tdrussell/diffusion-pipe/issues/159")
def empty(peer, folder):
    return damaged(peer, folder, 0)


@situation("file-size limit (a full disk) during a save; later there is room again", "sml2h3/dddd_trainer/issues/36")
def disk_full(peer, folder):
    trial = Trial(peer, folder / "trial", width=32)
    straight = trial.straight()
    first = trial.life({**SLOW, "limit_at": 300, "limit": 40_000, "limit_kills": False})
    if first.code == 0 and len(first.rates) == 3 * STEPS:
        return "wrong (exit 0, no word)" if "File too large" not in first.text else "ok (trained on without checkpoints)"
    return judge(trial, trial.life(), len(first.rates), straight, 2 * STEPS)  # it may have trained on without saving


@situation("from 1 to 2 processes at a resume", "ecmwf/WeatherGenerator/issues/280")
def processes(peer, folder):
    trial = Trial(peer, folder / "trial", norm=False, elastic=True)
    straight = trial.straight()
    first = killed(trial, 240)
    return judge(trial, trial.life(processes=2), len(first.rates), straight, STEPS, tolerance=1e-5)


@situation("EMA after a resume", "Megvii-BaseDetection/YOLOX/issues/1318")
def ema(peer, folder):
    return kill_and_resume(peer, folder, ema=True)


@situation("learning rate after a resume in mid-epoch", "vllm-project/speculators/pull/900")
def rate_mid_epoch(peer, folder):
    return rates_after(peer, folder, at=1.55, every=7, schedule="cosine")


@situation("counters of the plateau scheduler after a kill", "huggingface/pytorch-image-models/pull/2756")
def plateau(peer, folder):
    return rates_after(peer, folder, at=3.2, epochs=6, schedule="plateau", wrong_labels=True, lr=0.2)


def rates_after(peer: Peer, folder: Path, at: float, **settings) -> str:
    trial = Trial(peer, folder / "trial", **settings)
    whole = trial.straight().only.rates
    if len(set(whole)) < 2:
        raise Invalid("the learning rate didn't change")
    first = killed(trial, int(at * 200))
    life = trial.life()
    if life.code:
        return refused(trial, life)
    if len(life.rates) >= trial.updates:
        return "lost (all: began anew)"
    begins = restored(whole, life)
    if begins is None:
        begins = len(whole) - len(life.rates)
    if begins > len(first.rates):
        return f"wrong ({begins - len(first.rates)} updates skipped)"
    if life.rates[: len(whole) - begins] != whole[begins:]:
        return f"wrong ({sum(a != b for a, b in zip(whole[begins:], life.rates, strict=False))} rates differ)"
    more = len(life.rates) - len(whole) + begins
    return f"wrong ({more} updates too many)" if more else "ok"


def restored(whole: list[float], life: Life) -> int | None:
    """The update from which a life goes on, by its learning rate; None where that tells nothing."""
    return whole.index(life.rates[0]) if len(set(whole)) == len(whole) and life.rates[0] in whole else None


@situation("patience of early stopping after a kill", "Lightning-AI/pytorch-lightning/issues/18727")
def patience(peer, folder):
    trial = Trial(peer, folder / "trial", epochs=8, patience=3, wrong_labels=True, lr=0.2)
    straight = trial.straight()
    if len(straight.only.rates) >= 8 * STEPS:
        raise Invalid("nothing stopped the undisturbed run")
    first = killed(trial, 640)
    return judge(trial, trial.life(), len(first.rates), straight, STEPS)


@situation("best checkpoint, from before a kill, after the resume", "keras-team/keras/issues/17012")
def best(peer, folder):
    trial = Trial(peer, folder / "trial", epochs=4, best=True, wrong_labels=True, lr=0.2)
    straight = trial.straight()
    killed(trial, 440)
    life = trial.life()
    if life.code:
        return refused(trial, life)
    if len(life.rates) >= trial.updates:
        return "lost (all: began anew)"
    a, b = straight.facts()["best"], trial.facts()["best"]
    return "ok" if a == b else f"wrong (best is that of epoch {b or 'none'}, not {a})"


@situation("101 images evaluated by 2 processes", "roboflow/rf-detr/issues/1507")
def uneven(peer, folder):
    import common
    import net
    import torch

    trial = Trial(peer, folder / "trial", epochs=1, processes=2, elastic=True)
    straight = trial.straight()
    network = net.build().eval()
    network.load_state_dict({k: torch.from_numpy(v) for k, v in straight.final().items()})
    images, labels = common.arrays("val")
    with torch.no_grad():
        outputs = network((torch.from_numpy(images).float()[:, None] - 73) / 90)
        exact = float(torch.nn.functional.cross_entropy(outputs, torch.from_numpy(labels)))
    loss = straight.facts()["loss"]
    return "ok" if abs(loss - exact) < 2e-5 else f"wrong (loss {loss:.5f}, exact {exact:.5f})"


@situation("clipping with 2 accumulated batches = one batch of double size", "facebookresearch/lingua/pull/59")
def clip(peer, folder):
    trial = Trial(peer, folder / "trial", clip=0.05, norm=False, accumulate=2)
    other = trial.straight(accumulate=1, batch=40)
    life = trial.life()
    if life.code:
        return refused(trial, life)
    if len(life.rates) != len(other.only.rates):
        return f"wrong ({len(life.rates)} updates instead of {len(other.only.rates)})"
    far = distance(trial.final(), other.final())
    return "ok" if far == 0 else "ok (to 1e-05)" if far < 1e-5 else f"wrong (weights differ by {far:.1g})"


@situation("each image once an epoch after a resume in mid-epoch", "huggingface/accelerate/pull/4233")
def order(peer, folder):
    trial = Trial(peer, folder / "trial", shuffle=True, stateful=True, every=7, schedule="cosine")
    straight = trial.straight()
    first = killed(trial, 310)
    life = trial.life()
    if life.code:
        return refused(trial, life)
    if len(life.images) >= 3 * STEPS:
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
    less, more = (sum(n < 3 for n in counts.values()), sum(n > 3 for n in counts.values()))
    return f"wrong (of 200 images in 3 epochs {less} too seldom, {more} too often)"


@situation("draws of shuffling, augmentation, dropout after a resume", "vllm-project/speculators/issues/1027")
def draws(peer, folder):
    """With both kinds of loaders that PyTorch's trainers offer; the better counts."""
    settings = {"shuffle": True, "dropout": 0.2, "augment": True}
    verdict = kill_and_resume(peer, folder, **settings)
    return verdict if verdict == "ok" else kill_and_resume(peer, folder, **settings, stateful=True)


@situation("a checkpoint of another network in the folder", "hpcaitech/ColossalAI/issues/5492")
def other_network(peer, folder):
    trial = Trial(peer, folder / "trial", width=8)
    killed(trial, 240)
    straight = trial.straight(width=12)
    life = trial.life(width=12)
    if life.code:
        return refused(trial, life, ("size mismatch", "shape", "model.args"))
    far = distance(trial.final(), straight.final())
    anew = len(life.rates) >= len(straight.only.rates) and far < 1e-6
    return "ok (trained anew)" if anew else "wrong (loaded a part of it)"


@situation("loss is NaN in one batch", "Nerogar/OneTrainer/issues/1147")
def nan(peer, folder):
    trial = Trial(peer, folder / "trial", check_nan=True)
    straight = trial.straight()
    first = trial.life({**SLOW, "nan_at": 300})
    values = trial.final()
    if first.code == 0 and len(first.rates) >= 3 * STEPS - 1:
        bad = any(np.isnan(v).any() for v in values.values())
        return "wrong (exit 0, weights are NaN)" if bad else "ok (left the batch out)"
    again = judge(trial, trial.life(), len(first.rates), straight, STEPS)
    return f"{again.replace('ok', 'ok: stopped, and resumes from before', 1)}" if again.startswith("ok") else f"stopped; then {again}"


@situation("two runs in one output folder at once", "meta-pytorch/torchtune/issues/481")
def two_runs(peer, folder):
    trial = Trial(peer, folder / "trial")
    run = trial.start({"slow": 0.4})
    run.until(lambda: run.updates() >= 2)
    second = trial.life()
    alive = run.process.poll() is None
    first = run.wait()
    if second.code and alive:
        return refused(trial, second, ("another run", "in use", "already"))
    if first.code:
        return f"wrong (the first run failed: {first.last_line.split(':')[0][:40]})"
    return "wrong (both train and save there)"


@situation("epochs raised from 2 to 4 after the end", "ultralytics/ultralytics/issues/802")
def raised(peer, folder):
    trial = Trial(peer, folder / "trial", epochs=2)
    straight = trial.straight(epochs=4)
    first = trial.life()
    if first.code:
        raise Invalid(first.last_line)
    return judge(trial, trial.life(epochs=4), len(first.rates), straight, 0)
