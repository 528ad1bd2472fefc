"""`stagerun rehearse`: all stages with a few iterations, and what the real run will take. `measure` runs in the workers."""
