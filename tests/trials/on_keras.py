"""Keras on torch, as its documentation says: BackupAndRestore, ModelCheckpoint, EarlyStopping, TerminateOnNaN, `use_ema`."""

import csv
import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import common
import keras
import net
import numpy as np
import torch
from common import CFG
from keras import callbacks as c
from keras import layers


class Trace(layers.Layer):
    """Where the other trainers' network has its first line."""

    def call(self, x, training=False):
        real = isinstance(x, torch.Tensor) and x.device.type != "meta"
        return x * net.at_batch(x) if training and real else x


def build():
    augment = (
        [layers.RandomFlip("horizontal", seed=1), layers.RandomTranslation(0.07, 0.07, seed=2)] if CFG.augment else []
    )
    parts = [layers.Input((28, 28, 1)), *augment, Trace()]
    for width in (CFG.width, 2 * CFG.width):
        norm = [layers.BatchNormalization(momentum=0.9)] if CFG.norm else []
        parts += [layers.Conv2D(width, 3, 2, "same"), *norm, layers.ReLU()]
    return keras.Sequential(
        [*parts, layers.GlobalAveragePooling2D(), layers.Dropout(CFG.dropout, seed=3), layers.Dense(10)]
    )


class Rates(c.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch % CFG.accumulate == 0:
            net.say(lr=float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def main():
    torch.set_num_threads(1)
    keras.utils.set_random_seed(common.TORCH_SEED)
    model = build()
    rate = keras.optimizers.schedules.CosineDecay(CFG.lr, common.updates()) if CFG.schedule == "cosine" else CFG.lr
    more = {"gradient_accumulation_steps": CFG.accumulate} if CFG.accumulate > 1 else {}
    more |= {"use_ema": True, "ema_momentum": 0.9} if CFG.ema else {}
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=CFG.clip, **more)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    out = Path(CFG.out)
    out.mkdir(exist_ok=True)
    # Two states, of which the older is taken where the newer can't be read.
    two = {"double_checkpoint": CFG.keep > 1, "delete_checkpoint": False}
    hooks = [c.TerminateOnNaN(raise_error=True)] if CFG.check_nan else []
    hooks += [Rates(), c.BackupAndRestore(out / "backup", **two)]
    hooks += [c.ReduceLROnPlateau("val_loss", patience=2)] if CFG.schedule == "plateau" else []
    hooks += [c.EarlyStopping("val_loss", patience=CFG.patience)] if CFG.patience else []
    if CFG.best:
        log = out / "log.csv"
        known = (
            min((float(row["val_loss"]) for row in csv.DictReader(log.open())), default=None) if log.exists() else None
        )
        hooks.append(c.ModelCheckpoint(out / "best-{epoch}.keras", save_best_only=True, initial_value_threshold=known))
        hooks.append(c.CSVLogger(log, append=True))
    (x, y), (x_val, y_val) = (common.arrays(part, CFG.images, CFG.wrong_labels) for part in ("train", "val"))
    x, x_val = ((images[..., None].astype("float32") - 73) / 90 for images in (x, x_val))
    val = {"validation_data": (x_val, y_val), "validation_batch_size": 20}
    model.fit(x, y, CFG.batch, CFG.epochs, 0, hooks, shuffle=CFG.shuffle, **val)
    best = max(out.glob("best-*"), key=lambda p: p.stat().st_mtime).stem if CFG.best else ""
    common.save_final({w.path: np.array(keras.ops.convert_to_numpy(w)) for w in model.weights}, best=best)


if __name__ == "__main__":
    main()
