"""Images: LMDB records of Caffe's Datum, decoded, transformed and batched. numpy, cv2 and lmdb; no torch.

`records` reads numbered records of an LMDB or its copy; `datum` turns bytes into a picture and its label; `transform` draws a transform
and `pixels` applies it; `pictures` combines them for a record, and keeps the decoded images of small sets. `loader` turns positions
into batches, which threads make ahead in `stream`; `loaders` has the loaders of training and evaluation, and tries some
images before a run. `jpeg/` decodes, in tiers.

`weights` finds the weights that a stage starts with, and reads Caffe's mean image.

`index` is the side file of an LMDB; `stagerun.system.lmdb_file` reads the LMDB itself. `scratch` copies LMDBs to fast disks.
`importing/` makes LMDBs of images in other forms. Commands for image sets are in `stagerun.tools.data`.
"""
