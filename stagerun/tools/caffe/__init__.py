"""`stagerun import caffe`: folders of original Caffe, Intel's and SURFsara's Caffe become a schedule's folder. Nothing in them is run.

`order` reads what was trained after what, `settings`, `images` and `whole` what solvers and nets say; `convert` makes stages of it, and `write`
their folder. A field of Caffe is a row in `settings`.
"""
