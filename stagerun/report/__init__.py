"""Sinks for events: what rank 0 shows and stores. Nothing flows back from here."""

from stagerun.report.console import Console, print_nowhere
from stagerun.report.jsonl import JsonLines
from stagerun.report.table import results_table

__all__ = ["Console", "JsonLines", "print_nowhere", "results_table"]
