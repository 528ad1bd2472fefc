"""`stagerun bench`: what the machines at hand do with a schedule.

`bench scaling`: `command` starts workers, `measure` runs in them, `report` makes the table. `bench compression`: `compression` starts runs,
`cases` says which, `outcome` reads their logs and makes the table, `accuracy` the picture.
"""
