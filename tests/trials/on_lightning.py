"""PyTorch Lightning, as its documentation says: `fit(ckpt_path="last")` and ModelCheckpoint; EMAWeightAveraging; EarlyStopping."""

import os

import common
import lightning as L
import torch
import torch.nn.functional as F
from common import CFG
from lightning.pytorch import callbacks as c
from torch.optim import lr_scheduler as lrs
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
        policies = {
            "fixed": {},
            "cosine": {"scheduler": lrs.CosineAnnealingLR(optimizer, common.updates()), "interval": "step"},
            "plateau": {"scheduler": lrs.ReduceLROnPlateau(optimizer, patience=2), "monitor": "val_loss"},
        }
        policy = policies[CFG.schedule]
        return {"optimizer": optimizer, **({"lr_scheduler": policy} if policy else {})}


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
    hooks = [
        c.ModelCheckpoint(f"{CFG.out}/newest", save_last=True, monitor="step", mode="max", save_top_k=CFG.keep, **when)
    ]
    hooks += [c.ModelCheckpoint(f"{CFG.out}/best", monitor="val_loss", filename="{epoch}")] if CFG.best else []
    hooks += [c.EarlyStopping("val_loss", patience=CFG.patience)] if CFG.patience else []
    hooks += [c.EMAWeightAveraging(decay=0.9)] if CFG.ema else []
    where = {"accelerator": "cpu", "devices": CFG.processes, "strategy": "ddp" if CFG.processes > 1 else "auto"}
    steps = {"accumulate_grad_batches": CFG.accumulate, "gradient_clip_val": CFG.clip, "detect_anomaly": CFG.check_nan}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = L.Trainer(max_epochs=CFG.epochs, deterministic=True, callbacks=hooks, **where, **steps, **quiet)
    module = Module()
    trainer.fit(module, loader("train"), loader("val"), ckpt_path="last")
    best = hooks[1].best_model_path.rpartition("=")[2].partition(".")[0] if CFG.best else ""
    common.save_final(module.net.state_dict(), loss=float(trainer.callback_metrics["val_loss"]), best=best)


if __name__ == "__main__":
    main()
