"""`stagerun verify-run`: the proofs in a run's log against its snapshots, and against training done again. `proofs` and `stretches` are pure,
`check` reads and compares, `command` says what came of it and trains.
"""
