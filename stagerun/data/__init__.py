"""Images: LMDB records of Caffe's Datum, decoded, transformed and handed out as batches. numpy, cv2 and lmdb; no torch.

`lmdb_source` turns a folder into numbered records of bytes, `datum` bytes into a picture and its label, `transform` a
picture into what the network sees, `pictures` does these for a record, `loader` turns positions into batches, whose making
ahead by threads is `stream`. `memory` keeps the decoded images of small sets. `jpeg/` has the ways to decode, a new one is a
row in `jpeg/choice`; what a transform draws is in `transform`, `rectangles` and `lighting`, the resizing in `pixels`. `index` is the
side file of an LMDB, `lmdb_offsets` where its records lie.

`scratch/` copies LMDBs to fast disk, `switching` goes over to a copy while it is read. `write` makes small LMDBs. What is done to image
sets beside a run, `stagerun data import` first of all, is in `stagerun.tools.data`.
"""
