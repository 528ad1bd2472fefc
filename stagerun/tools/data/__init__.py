"""What is done to image sets beside a run: they are imported, prepared, described, verified and shown (`stagerun data`).

Import: `sources/` has a file for each format, a new one is a row of its table; `odd` judges single images; `images` makes a record of
each; `engine` walks the work in order, commits and finishes, and knows neither formats nor images; `partial` is the folder of an
unfinished import; `report` what it says at the end. `prepare` is other work for the same engine. `index` makes the side file of an LMDB, describes and
verifies it, `contact_sheet` draws its images. `fashion` makes the LMDBs of Fashion-MNIST.
"""
