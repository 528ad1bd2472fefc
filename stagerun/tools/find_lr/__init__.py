"""`stagerun find-lr`: a sweep of the learning rate from a stage's start. `sweep` is pure; `measure` runs in the workers."""
