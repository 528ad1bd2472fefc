"""`stagerun rehearse`: all stages with a few iterations, and what the real run will take (`measure` runs in the workers). `find_lr`, `sweep` and
`sweep_run`: a stage at growing rates. `hosts` and `hosts_measure`: which host is missing, slow or different.
"""
