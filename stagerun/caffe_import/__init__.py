"""Folders of original Caffe, Intel's and SURFsara's Caffe -> a schedule's folder. Nothing in them is run."""

from stagerun.caffe_import.convert import Converted, Wanted, convert
from stagerun.caffe_import.disk import CaffeFolder, refuse_existing, write_folder
from stagerun.caffe_import.write import check_lines, folder_lines, left_text, text_of_lines

__all__ = [
    "CaffeFolder",
    "Converted",
    "Wanted",
    "check_lines",
    "convert",
    "folder_lines",
    "left_text",
    "refuse_existing",
    "text_of_lines",
    "write_folder",
]
