"""What is done to image sets beside a run: they are imported, prepared, described, verified and shown (`stagerun data`).

`sources/` has a file for each format that can be imported; `odd` judges single images; `importing/` makes the LMDB, `prepare` another
one of it. `describe` and `verify` look at an LMDB, `contact_sheet` draws its images. `fashion` makes the LMDBs of Fashion-MNIST.
"""
