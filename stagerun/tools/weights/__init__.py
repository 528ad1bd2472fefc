"""`stagerun eval`, `predict` and `export`: use trained weights. `selection` finds the snapshot that is meant."""
