"""`stagerun eval`, `predict` and `export`: what is done with trained weights. `selection` finds the snapshot that is meant."""
