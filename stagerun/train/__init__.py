"""A run, from its options to the last event: `run` is a worker's run on one screen, `stage` one stage, `hooks/` what hangs on its events.

`command` is `stagerun run`, `options` its options, `first_look` what it finds and prints before workers start: these without torch.
`keeper` holds the output folder on rank 0. The only folder that imports plan, store, data and engine together. Logs that a run writes are
in `logs/`; what only other commands ask of an output folder is in `tools/output.py`.
"""
