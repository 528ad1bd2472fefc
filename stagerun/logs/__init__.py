"""Sinks of a run's events on rank 0: the terminal, log.jsonl, and the formats of other tools; and the reader of log.jsonl. Nothing flows back
into the run.

A log format is a class and a row in `table`. A service that can't take lines back is a tracker (`tracker.Tracker`): a separate process follows
OUT/log.jsonl and sends it the final lines. Another package adds one by an entry point in the group `stagerun.logs`.
"""
