"""A run, from its options to the last event: `run` is a worker's run on one screen, `walk` the stages of a plan, `stage` one stage.

`command` is `stagerun run`, `options` its options, `first_look` what it finds and prints before workers start: these without torch.
`keeper` holds the output folder on rank 0. The only folder that imports plan, store, data and engine together. Logs that a run writes are
in `logs/`.
"""
