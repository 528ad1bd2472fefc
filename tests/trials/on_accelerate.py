"""Accelerate, as its documentation says: `save_state` and `load_state` with automatic names, registered objects, `gather_for_metrics`."""

import os
import sys

import common
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from common import CFG
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


class Progress:
    """The loop's own counters, registered for checkpoints."""

    def __init__(self):
        self.epoch = self.batch = self.bad = 0
        self.best, self.best_epoch = float("inf"), 0

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


def evaluate(accelerator, model, loader):
    model.eval()
    losses = []
    for x, y in loader:
        with torch.no_grad():
            outputs, labels = accelerator.gather_for_metrics((model(x), y))
        losses.append(F.cross_entropy(outputs, labels, reduction="none"))
    model.train()
    return float(torch.cat(losses).mean())


def main():
    set_seed(common.TORCH_SEED)
    common.trace_updates()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=CFG.accumulate,
        project_config=ProjectConfiguration(CFG.out, automatic_checkpoint_naming=True, total_limit=CFG.keep),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=CFG.stateful),
    )
    model = common.build()
    optimizer = torch.optim.SGD(model.parameters(), CFG.lr, momentum=0.9)
    policy = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, common.updates()) if CFG.schedule == "cosine" else None
    batch = CFG.batch // CFG.processes
    train, val = DataLoader(common.Images("train"), batch, shuffle=CFG.shuffle), DataLoader(common.Images("val"), batch)
    model, optimizer, train, val, policy = accelerator.prepare(model, optimizer, train, val, policy)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer.optimizer, patience=2)
    ema = AveragedModel(accelerator.unwrap_model(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if CFG.schedule == "plateau":
        accelerator.register_for_checkpointing(plateau)
    if CFG.ema:
        accelerator.register_for_checkpointing(ema)
    folder = f"{CFG.out}/checkpoints"
    saved = os.listdir(folder) if os.path.isdir(folder) else []
    if saved:
        accelerator.load_state()
        accelerator.project_configuration.iteration = 1 + max(int(name.rpartition("_")[2]) for name in saved)

    loss = None
    while progress.epoch < CFG.epochs:
        train.set_epoch(progress.epoch)
        skip = progress.batch and not CFG.stateful  # a stateful loader goes on by itself
        for x, y in skip_first_batches(train, progress.batch) if skip else train:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if CFG.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CFG.clip)
                optimizer.step()
                if policy:
                    policy.step()
                optimizer.zero_grad()
            if CFG.ema:
                ema.update_parameters(accelerator.unwrap_model(model))
            progress.batch += 1
            at_end = progress.batch == CFG.images // CFG.batch
            if CFG.every and (progress.epoch * CFG.images // CFG.batch + progress.batch) % CFG.every == 0 and not at_end:
                accelerator.save_state()
        loss = evaluate(accelerator, model, val)
        if CFG.schedule == "plateau":
            plateau.step(loss)
        progress.bad = 0 if loss < progress.best else progress.bad + 1
        if loss < progress.best:
            progress.best, progress.best_epoch = loss, progress.epoch
        progress.epoch, progress.batch = progress.epoch + 1, 0
        accelerator.save_state()
        if CFG.patience and progress.bad >= CFG.patience:
            break
    state = accelerator.unwrap_model(model).state_dict()
    if CFG.ema:
        state |= {f"ema.{k}": v for k, v in ema.module.state_dict().items()}
    common.save_final(state, loss=loss, best=str(progress.best_epoch))


if __name__ == "__main__":
    common.start_processes(sys.argv[0])
    main()
