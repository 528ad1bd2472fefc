"""Sinks for events: what rank 0 shows and stores. Nothing flows back from here."""

from stagerun.report.console import Console, finished_line, print_nowhere
from stagerun.report.jsonl import JsonLines
from stagerun.report.table import ensembles_table, results_table

__all__ = ["Console", "JsonLines", "ensembles_table", "finished_line", "print_nowhere", "results_table"]
