"""Where a run's events go on rank 0: the terminal, log.jsonl, and the formats of other tools. Nothing flows back from here.

A log format is a file here and a row in `table`; what can't take a line back is in `trackers`.
"""
