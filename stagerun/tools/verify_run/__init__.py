"""`stagerun verify-run`: the proofs in a run's log against its snapshots, and against training done again. `proofs` is pure, `command` reads and
trains.
"""
