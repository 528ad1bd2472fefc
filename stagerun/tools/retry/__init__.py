"""`stagerun retry -- COMMAND`: starts a launcher's command, and again when a worker was lost. `commanded` reads what that command says."""
