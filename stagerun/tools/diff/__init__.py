"""`stagerun diff`: in what two schedules differ, or a schedule and a run."""
