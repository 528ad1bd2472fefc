"""`stagerun rehearse`: all stages with a few iterations, and what the real run will take (`measure` runs in the workers). `find_lr`, `sweep` and
`sweep_run`: a stage at growing rates. `hosts`, `hosts_measure` and `hosts_page`: which host is missing, slow or different.
"""
