"""Sets of labelled images in the formats that people have them in, for `stagerun data import`: one way to ask them all.

    folder      a folder per class, as torchvision's ImageFolder; or a tar of such folders
    list        a text of `path label` lines, as Caffe's convert_imageset
    imagenet    ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar or a folder of val with the ground truth; never unpacked
    cifar       CIFAR-10 and CIFAR-100 in the binary version: the folder, or its .tar.gz
    idx         MNIST, Fashion-MNIST, EMNIST and the like, gzipped or not
    tfrecord    shards of tf.train.Example with ImageNet's keys
    recordio    MXNet's .rec

`open_source` tells which from the content. Archives are read in place, by offset. Nothing here decodes an image, runs
anything, or follows a name out of an archive.
"""

from stagerun.tools.data.sources.detect import open_source
from stagerun.tools.data.sources.items import FORMATS, SPLITS, Item, Pixels, Source, SourceOptions

__all__ = ["FORMATS", "SPLITS", "Item", "Pixels", "Source", "SourceOptions", "open_source"]
