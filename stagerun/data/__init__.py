"""Images: LMDB records of Caffe's Datum, decoded, transformed and handed out as batches. numpy, cv2 and lmdb; no torch.

`lmdb_source` turns a folder into numbered records of bytes, `datum` bytes into a picture and its label, `transform` a
picture into what the network sees, `pictures` does these for a record, `loader` turns positions into batches, whose making
ahead by threads is `stream`. `memory` keeps the decoded images of small sets. `scratch` copies an LMDB to fast disk; `write` and
`idx` make LMDBs; `fashion` makes those of Fashion-MNIST.
"""
