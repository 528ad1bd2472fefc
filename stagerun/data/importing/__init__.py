"""A set of labelled images becomes an LMDB: `stagerun data import` does it, and a run whose `source` is a folder of class folders.

`odd` judges single images; `images` makes a record of each; `engine` walks the work in order, commits and finishes, and knows neither
formats nor images; `partial` is the folder of an unfinished import, and the report of a complete one. `items` is what all formats have
in common, and class folders, which runs read; the others are in `stagerun.tools.data.sources`. `first_use` imports for a run.
"""
