"""`stagerun view`: the page of a schedule and its runs.

`chart` draws it as SVG, from `picture` and what `follow` reads of a run's log.
"""
