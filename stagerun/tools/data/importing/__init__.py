"""Making an LMDB from many images: in parallel, restartable, whole or not at all.

engine     walks the work in order, commits, finishes; knows neither formats nor images
images     the work of `import`: sources -> records
partial    the folder of an unfinished import: who may write it, what it is part of, its last rename
journal    what is known about each record of it, for the side file and for going on
parallel   threads, results in order
ignored    files that were passed over by their names, in words
"""
