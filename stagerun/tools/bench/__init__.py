"""`stagerun bench scaling`: speed and efficiency by number of workers. `measure` runs in the workers, `report` makes the table."""
