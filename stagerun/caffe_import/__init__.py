"""Folders of original Caffe, Intel's and SURFsara's Caffe -> a schedule's folder. Nothing in them is run."""
