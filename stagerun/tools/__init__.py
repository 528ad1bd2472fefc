"""What stands beside a run, a folder for each tool.

A tool imports the trunk, and another tool only by an entry in `tests/fast/test_layers.py`. The trunk never imports a tool: `stagerun.cli` names
each command as text, and its module is imported when it is called.
"""
