"""A set of labelled images becomes an LMDB: `stagerun data import` does it, and a run whose `source` is a folder of class folders.

`odd` judges single images; `images` makes a record of each; `engine` walks the work in order, commits and finishes, and knows neither
formats nor images; `partial` is the folder of an unfinished import; `report` what it says at the end. `items` and `folder` are what
all formats have in common, and the one of them that the trunk reads; the others are in `stagerun.tools.data.sources`.
"""
