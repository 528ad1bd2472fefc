"""`stagerun status`: what a run is doing, and what is saved. Reads an output folder; changes it only for `--pin` and `--drop`."""
