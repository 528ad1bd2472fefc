"""The tools around a run: a module, or a folder if it takes several.

A tool imports the trunk and other tools, never in a circle. The trunk never imports a tool: `stagerun.cli` names each command as text, and
imports its module when the command is called.
"""
