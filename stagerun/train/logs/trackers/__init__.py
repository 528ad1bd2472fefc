"""Logs that live elsewhere and can't take a line back. A process of their own follows OUT/log.jsonl and sends on what stands for good.

A tracker is a module here with a class of the shape of `tracker.Tracker`, and a row in `LOGS` of `train/logs/table.py`. Another package adds
one by an entry point in the group `stagerun.logs`.
"""
