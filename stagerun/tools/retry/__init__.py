"""`stagerun retry -- COMMAND`: starts a launcher's command, and again when a worker was lost."""
