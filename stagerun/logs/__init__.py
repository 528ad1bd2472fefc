"""Where a run's events go on rank 0: the terminal, log.jsonl, and the formats of other tools; and who reads log.jsonl. Nothing flows back from
here into the run.

A log format is a file here and a row in `table`. A log that lives elsewhere and can't take a line back is a tracker (`tracker.Tracker`): a
process of its own follows OUT/log.jsonl and sends it what stands for good. Another package adds one by an entry point in the group
`stagerun.logs`.
"""
