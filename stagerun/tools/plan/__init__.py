"""`stagerun check` and `plan`: mistakes, what will run, how long it takes, and its picture. What they show is computed in `stagerun.plan`."""
