"""What is done to image sets beside a run: they are imported, prepared, described, verified and shown (`stagerun data`).

Import: `sources/` has a file for each format, a new one is a row of its table; `stagerun.data.importing` makes the LMDB, since a run
imports small folders, too. `prepare` is other work for the same engine. `index` makes the side file of an LMDB, describes and
verifies it, `contact_sheet` draws its images. `fashion` makes the LMDBs of Fashion-MNIST.
"""
