"""Shared parts of commands: options, endings, the terminal.

An option is a field of a frozen dataclass, or a parameter of the command's function: `options` derives click's parameters, the help and
a worker's arguments from it. Options of several commands are in `shared`. A new command is a function with `@command` in its tool's folder, and a
row in `stagerun.cli`. Nothing here imports torch.
"""
