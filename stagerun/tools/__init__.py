"""What stands beside a run, a folder for each: nothing but `stagerun.cli` imports from here."""
