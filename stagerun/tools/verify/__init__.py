"""`stagerun verify`: of a run, its proofs against its snapshots and against training again (`proofs` is pure, `check` reads and compares); of a
schedule, that a killed run goes on to the same bits (`kills`). `child` is a command of which nothing is left.
"""
