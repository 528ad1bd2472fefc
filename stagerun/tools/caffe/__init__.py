"""`stagerun import caffe`: folders of original Caffe, Intel's and SURFsara's Caffe become a schedule's folder. Nothing in them is run.

`order` finds what was trained after what, `settings` and `net` read the files, `convert` makes stages of them, `write` writes the folder. A
field of Caffe is a row in `settings`.
"""
