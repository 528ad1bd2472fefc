"""Words that people look up and that are not the name of a field: what they are called here, or that they are not possible today."""

# In the first line of each its name and synonyms, in small letters.
_TEXT = """\
own images, my images, own data, dataset
  `stagerun data import FOLDER LMDB` makes an LMDB of a folder that has a folder of images for each class: once for
  training, once for evaluation; pictures of many sizes with `--resize-height N --resize-width N`. `stagerun new NAME
  --train LMDB --val LMDB` makes a schedule for them.
  See `stagerun help your-own-images`, `stagerun help Source`, `stagerun new --help`, `stagerun data import --help`.

collapse, cooldown, annealing
  A short stage that ends a training: a steep decay to zero, no augmentation, often more weight decay. It starts from
  the end of any stage, or from an iteration of it. `stagerun new` makes a schedule that has one.
  See `stagerun help designing`, `stagerun help from`, `stagerun help lr_policy`, `stagerun help weight_decay`,
  `stagerun help transform_param`.

freeze, frozen, lock
  `param { name: "layer1.*" lr_mult: 0 }` in a stage freezes these parameters there; they get no gradient. Running
  statistics of BatchNorm still move. Not possible today: to hold those.
  See `stagerun help ParamSpec`.

weights, pretrained, transfer, finetune, fine tune, fine tuning, transfer learning, init weights
  A stage starts from the weights of another stage of its schedule: `from`. Not possible today: to start from the
  weights of another program, or of another schedule.
  See `stagerun help StageEntry.from`, `stagerun help Carry`, `stagerun help Model`.

resize, image size, resolution, input size
  Once, when the LMDB is made: `stagerun data import --resize-shorter N`, or `--resize-height N --resize-width N`.
  Each time an image is read: `random_resize_param`, `random_resized_crop_param`. The network gets `crop_size`.
  See `stagerun help crop_size`, `stagerun help random_resize_param`, `stagerun help crop_size_ramp_param`, `stagerun
  data import --help`.

augmentation, augment, flip, rotation, randaugment, mixup, cutmix, normalization
  `transform_param` says what is done to each training image, `mixup_alpha` and `cutmix_alpha` to pairs of them. A
  stage that sets `transform_param` replaces all of it.
  See `stagerun help TransformParameter`, `stagerun help mixup_alpha`, `stagerun help cutmix_alpha`, `stagerun help
  label_smoothing`, `stagerun data show --help`.

warmup, warm up
  A straight line from `warmup_start_lr` to `base_lr` at the start of a stage.
  See `stagerun help warmup_iter`, `stagerun help warmup_start_lr`, `stagerun help decay_from`.

resume, continue, restart, checkpoint, crash
  The same `stagerun run DIR` goes on after anything. `snapshot` says how much a crash costs at most; a stop saves.
  See `stagerun help running-and-resuming`, `stagerun help snapshot`, `stagerun help keep_snapshots`, `stagerun run
  --help`, `stagerun snapshots --help`.

learning rate, lr, scheduler, decay
  `base_lr` and `lr_policy`; `stagerun plan DIR --plot` draws it over all stages.
  See `stagerun help designing`, `stagerun help base_lr`, `stagerun help lr_policy`, `stagerun help base_lr_batch`,
  `stagerun plan --help`.

epochs, length, duration
  Every length can be given in iterations (weight updates) or in epochs: `max_iter` or `max_epoch`.
  See `stagerun help max_iter`, `stagerun help max_epoch`.

batch, gradient accumulation, accumulation, out of memory, oom
  `batch_size` counts over the whole job. `device_batch_size` is what one worker computes at once: less of it needs
  less memory, and gradients are accumulated.
  See `stagerun help batch_size`, `stagerun help device_batch_size`, `stagerun help iter_size`.

optimizer, optimiser
  `type` says how a gradient moves a weight.
  See `stagerun help Solver.type`, `stagerun help momentum`, `stagerun help weight_decay`.

validation, evaluation, accuracy, evaluate
  After every stage all images of `data.val` are evaluated, inside a stage at `test_interval`.
  See `stagerun help Data.val`, `stagerun help test_interval`, `stagerun help test_transform_param`, `stagerun eval
  --help`.

gpu, gpus, workers, nodes, machines, cluster, slurm
  How many workers there are is not part of a schedule: `stagerun run DIR --nproc N`, `--hosts`, or `stagerun sbatch`.
  See `stagerun help many-machines`, `stagerun help batch_size`, `stagerun run --help`, `stagerun sbatch --help`,
  `stagerun preflight --help`.

inference, predict, deploy, onnx, torchvision
  `stagerun predict SNAPSHOT FOLDER` says what is in pictures. `stagerun export` writes the network for torch,
  safetensors or ONNX, and says how it is loaded.
  See `stagerun help reports`, `stagerun predict --help`, `stagerun export --help`.

early stopping, patience
  Not possible today: a stage has the length that it is given. `plateau` lowers the rate where the loss stands still.
  See `stagerun help lr_policy`, `stagerun help plateau_winsize`.

class weights, imbalance, oversampling, multi label, regression, segmentation, detection, custom loss
  Not possible today: each image has one label, all count alike, and the loss is cross-entropy.
  See `stagerun help label_smoothing`.

own network, architecture, dropout
  `model.name` picks a network of a list, with its published dropout. Not possible today: a network of your own.
  See `stagerun help Model`.
"""

TOPICS = {entry.split(",")[0].split("\n")[0]: entry for entry in _TEXT.strip().split("\n\n")}
WORDS = {word: topic for topic, entry in TOPICS.items() for word in entry.split("\n")[0].split(", ")}


def topic_text(name: str) -> str:
    """What there is to say about a word or a few; '' where it is unknown."""
    topic = WORDS.get(" ".join(name.lower().replace("-", " ").replace("_", " ").split()), "")
    return "\n".join([topic, *TOPICS[topic].split("\n")[1:]]) if topic else ""
