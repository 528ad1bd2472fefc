"""What to write in place of fields that people know from Caffe and stagerun doesn't have."""

CAFFE: dict[str, str] = {
    "net": 'the network is named in schedule.prototxt: `model { name: "resnet50" num_classes: 1000 }`',
    "train_net": 'the network is named in schedule.prototxt: `model { name: "resnet50" num_classes: 1000 }`',
    "test_net": "training and evaluation share one network; the images of the evaluation are `data { val { ... } }` in "
    "schedule.prototxt",
    "net_param": 'the network is named in schedule.prototxt: `model { name: "resnet50" num_classes: 1000 }`',
    "train_net_param": 'the network is named in schedule.prototxt: `model { name: "resnet50" num_classes: 1000 }`',
    "test_net_param": "training and evaluation share one network; the images of the evaluation are "
    "`data { val { ... } }` in schedule.prototxt",
    "train_state": "leave it out: a network has no phases or levels here",
    "test_state": "leave it out: a network has no phases or levels here",
    "solver_mode": "leave it out: where it is computed is chosen on the command line",
    "device_id": "leave it out: where it is computed is chosen on the command line",
    "solver_type": 'write `type: "..."`; `stagerun help type` lists them',
    "snapshot_prefix": "leave it out: snapshots go to ./out/NAME/snapshots, or below the folder given with --out",
    "snapshot_after_train": "leave it out: a stage always ends with a snapshot",
    "snapshot_diff": "leave it out: a snapshot holds weights, momentum and place, not gradients",
    "snapshot_format": "leave it out: snapshots have one format",
    "test_initialization": "leave it out: `test_interval` says how often the stage is evaluated",
    "test_compute_loss": "leave it out: an evaluation always has the loss",
    "debug_info": "leave it out",
    "layer": "a network is not described in layers: `model` in schedule.prototxt names one",
    "data_param": "`data` in schedule.prototxt says where the images are",
    "mean_file": "write `mean_value`: one number per channel",
    "lr_mult": 'write `param { name: "..." lr_mult: ... }`',
    "decay_mult": 'write `param { name: "..." decay_mult: ... }`',
}

# Names of other programs for the same thing.
ELSEWHERE: dict[str, str] = {
    "learning_rate": "base_lr",
    "lr": "base_lr",
    "epochs": "max_epoch",
    "num_epochs": "max_epoch",
    "warmup_epochs": "warmup_epoch",
    "nesterov": "type",
    "optimizer": "type",
}
