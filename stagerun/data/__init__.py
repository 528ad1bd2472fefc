"""Images: LMDB records of Caffe's Datum, decoded, transformed and handed out as batches. numpy, cv2 and lmdb; no torch.

`lmdb_source` turns a folder into numbered records of bytes, `datum` bytes into an image and its label, `transform` an
image into what the network sees, `loader` positions into batches. `scratch` copies an LMDB to fast disk; `write` and
`idx` make LMDBs; `fashion` makes those of Fashion-MNIST.
"""
