"""stagerun: a staged training schedule as a folder of solver files, run as one job."""

__version__ = "0.1.0"
