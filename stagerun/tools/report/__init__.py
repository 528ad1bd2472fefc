"""`stagerun report`: tables, curves and pages of runs, from their logs and snapshots.

`read_log` and `history` read a run, `tables` and `curves` show it, `compare` several; `page` is the HTML.
"""
