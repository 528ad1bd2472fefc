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
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader


class Progress(dict):
    """The loop's own counters, registered for checkpoints."""

    state_dict = dict.copy
    load_state_dict = dict.update


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
    project = ProjectConfiguration(CFG.out, automatic_checkpoint_naming=True, total_limit=CFG.keep)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=CFG.stateful)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=CFG.accumulate, project_config=project, dataloader_config=loading
    )  # fmt: skip
    model = common.build()
    optimizer = torch.optim.SGD(model.parameters(), CFG.lr, momentum=0.9)
    policy = CosineAnnealingLR(optimizer, common.updates()) if CFG.schedule == "cosine" else None
    batch, steps = CFG.batch // CFG.processes, CFG.images // CFG.batch
    train, val = DataLoader(common.Images("train"), batch, shuffle=CFG.shuffle), DataLoader(common.Images("val"), batch)
    model, optimizer, train, val, policy = accelerator.prepare(model, optimizer, train, val, policy)
    plain = accelerator.unwrap_model(model)
    plateau = ReduceLROnPlateau(optimizer.optimizer, patience=2) if CFG.schedule == "plateau" else None
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True) if CFG.ema else None
    done = Progress(epoch=0, batch=0, bad=0, best=float("inf"), best_epoch=0)
    accelerator.register_for_checkpointing(*(one for one in (done, plateau, ema) if one is not None))
    if saved := os.listdir(f"{CFG.out}/checkpoints") if os.path.isdir(f"{CFG.out}/checkpoints") else []:
        accelerator.load_state()
        accelerator.project_configuration.iteration = 1 + max(int(name.rpartition("_")[2]) for name in saved)

    loss = None
    while done["epoch"] < CFG.epochs and not (CFG.patience and done["bad"] >= CFG.patience):
        train.set_epoch(done["epoch"])
        skip = done["batch"] and not CFG.stateful  # a stateful loader goes on by itself
        for x, y in skip_first_batches(train, done["batch"]) if skip else train:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if CFG.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CFG.clip)
                optimizer.step()
                if policy:
                    policy.step()
                optimizer.zero_grad()
            if ema:
                ema.update_parameters(plain)
            done["batch"] += 1
            if CFG.every and (done["epoch"] * steps + done["batch"]) % CFG.every == 0 and done["batch"] < steps:
                accelerator.save_state()
        loss = evaluate(accelerator, model, val)
        if plateau:
            plateau.step(loss)
        better = loss < done["best"]
        done.update({"bad": 0, "best": loss, "best_epoch": done["epoch"]} if better else {"bad": done["bad"] + 1})
        done.update(epoch=done["epoch"] + 1, batch=0)
        accelerator.save_state()
    averages = {f"ema.{k}": v for k, v in ema.module.state_dict().items()} if ema else {}
    common.save_final({**plain.state_dict(), **averages}, loss=loss, best=str(done["best_epoch"]))


if __name__ == "__main__":
    common.start_processes(sys.argv[0])
    main()
