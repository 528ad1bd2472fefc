"""Images: LMDB records of Caffe's Datum, decoded, transformed and handed out as batches. numpy, cv2 and lmdb; no torch.

`records` turns a folder, or a copy of it, into numbered records of bytes; `datum` bytes into a picture and its label; `transform` decides
what is done to a picture, and `pixels` does it; `pictures` does all of this for a record, and keeps the decoded images of small
sets. `loader` turns positions into batches, which threads make ahead in `stream`; `loaders` has those of training and of the kinds
of evaluation, and `preflight` looks at some of their images before a run. `jpeg/` has the ways to decode: a new one is a row in `jpeg/choice`.

`weights` finds the weights that a stage starts with, and reads Caffe's mean image.

`index` is the side file of an LMDB, `rows` what it knows of a record; `stagerun.system.lmdb_file` reads the LMDB itself.
`scratch/` copies LMDBs to fast disk. `importing/` makes LMDBs of images in other forms. What is done to image sets
beside a run is in `stagerun.tools.data`.
"""
