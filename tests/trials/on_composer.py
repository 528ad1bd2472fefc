"""Composer, as its documentation says: its launcher, `autoresume`, `save_overwrite`, EMA, GradientClipping, EarlyStopper, NaNMonitor."""

import os
import sys

import common
import torch
import torch.nn.functional as F
from common import CFG
from composer import Trainer
from composer.algorithms import EMA, GradientClipping
from composer.callbacks import EarlyStopper, NaNMonitor
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingScheduler
from composer.utils import dist, reproducibility
from torchmetrics import MeanMetric, MetricCollection


class Model(ComposerClassifier):
    """With the mean over images: Composer's own CrossEntropy is one over batches."""

    def __init__(self):
        metrics = [MetricCollection({"loss": MeanMetric()}) for _ in range(2)]
        super().__init__(common.build(), 10, *metrics, loss_fn=F.cross_entropy)

    def update_metric(self, batch, outputs, metric):
        metric.update(F.cross_entropy(outputs, batch[1], reduction="none"))


def loader(part, batch):
    images = common.Images(part)
    sampler = dist.get_sampler(images, shuffle=part == "train" and CFG.shuffle)
    return torch.utils.data.DataLoader(images, batch // CFG.processes, sampler=sampler)


def main():
    reproducibility.seed_all(common.TORCH_SEED)
    model = Model()
    ema = EMA(half_life="7ba") if CFG.ema else None
    clip = GradientClipping("norm", CFG.clip) if CFG.clip else None
    stop = EarlyStopper("loss", "eval", patience=CFG.patience) if CFG.patience else None
    trainer = Trainer(
        model=model,
        train_dataloader=loader("train", CFG.batch * CFG.accumulate),
        eval_dataloader=loader("val", 20),
        optimizers=torch.optim.SGD(model.parameters(), CFG.lr, momentum=0.9),
        schedulers=CosineAnnealingScheduler() if CFG.schedule == "cosine" else None,
        max_duration=f"{CFG.epochs}ep",
        device_train_microbatch_size=CFG.batch // CFG.processes,
        algorithms=[one for one in (ema, clip) if one],
        callbacks=[one for one in (stop, NaNMonitor() if CFG.check_nan else None) if one],
        run_name="run",
        autoresume=True,
        save_folder=CFG.out,
        save_interval=f"{CFG.every}ba" if CFG.every else "1ep",
        save_num_checkpoints_to_keep=CFG.keep,
        save_overwrite=True,  # else what a kill left of a checkpoint stops the next start
        seed=common.TORCH_SEED,
        deterministic_mode=True,
        device="cpu",
        progress_bar=False,
    )
    common.trace_updates()  # not before: to load, torch makes an optimizer's state by an update of rate 0
    trainer.fit()
    averages = {**ema.ema_model.named_parameters_dict, **ema.ema_model.named_buffers_dict} if ema else {}
    loss = float(trainer.state.eval_metrics["eval"]["loss"].compute())
    averages = {f"ema.{k}": v for k, v in averages.items()}
    common.save_final({**model.module.state_dict(), **averages}, loss=loss)


if __name__ == "__main__":
    if CFG.processes > 1 and "RANK" not in os.environ:  # torchrun sets no NODE_RANK, which autoresume reads
        launcher = [sys.executable, "-m", "composer", "-n", str(CFG.processes)]
        os.execv(sys.executable, [*launcher, sys.argv[0]])
    main()
