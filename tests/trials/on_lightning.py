"""PyTorch Lightning, as its documentation says: `fit(ckpt_path="last")` and ModelCheckpoint; EMAWeightAveraging; EarlyStopping."""

import os

import common
import lightning as L
import torch
import torch.nn.functional as F
from common import CFG
from lightning.pytorch import callbacks as c
from torch.utils.data import DistributedSampler


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = common.build()

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), CFG.lr, momentum=0.9)
        if CFG.schedule == "cosine":
            policy = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, common.updates())
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": policy, "interval": "step"}}
        if CFG.schedule == "plateau":
            policy = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": policy, "monitor": "val_loss"}}
        return optimizer


def loader(part):
    train = part == "train"
    kind = torch.utils.data.DataLoader
    if train and CFG.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind
    images, sampler = common.Images(part), None
    if train and CFG.processes > 1:  # the sampler that Lightning adds shuffles
        sampler = DistributedSampler(images, CFG.processes, int(os.environ.get("LOCAL_RANK", 0)), CFG.shuffle)
    return kind(images, CFG.batch // CFG.processes, shuffle=train and CFG.shuffle and not sampler, sampler=sampler)


def main():
    L.seed_everything(common.TORCH_SEED, workers=True)
    common.trace_updates()
    when = {"every_n_train_steps": CFG.every} if CFG.every else {}
    when |= {"save_on_train_epoch_end": True} if CFG.schedule == "plateau" else {}
    hooks = [c.ModelCheckpoint(f"{CFG.out}/newest", save_last=True, monitor="step", mode="max", save_top_k=CFG.keep, **when)]
    if CFG.best:
        hooks.append(c.ModelCheckpoint(f"{CFG.out}/best", monitor="val_loss", filename="{epoch}"))
    if CFG.patience:
        hooks.append(c.EarlyStopping("val_loss", patience=CFG.patience))
    if CFG.ema:
        hooks.append(c.EMAWeightAveraging(decay=0.9))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=CFG.processes,
        strategy="ddp" if CFG.processes > 1 else "auto",
        max_epochs=CFG.epochs,
        accumulate_grad_batches=CFG.accumulate,
        gradient_clip_val=CFG.clip,
        detect_anomaly=CFG.check_nan,
        deterministic=True,
        callbacks=hooks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Module()
    trainer.fit(module, loader("train"), loader("val"), ckpt_path="last")
    best = hooks[1].best_model_path if CFG.best else ""
    common.save_final(
        module.net.state_dict(),
        loss=float(trainer.callback_metrics["val_loss"]),
        best=best.rpartition("=")[2].partition(".")[0],
    )


if __name__ == "__main__":
    main()
