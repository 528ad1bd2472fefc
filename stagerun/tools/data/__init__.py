"""`stagerun data`: LMDBs are imported, verified, described and shown.

`importer` is the command and the table of formats; `sources`, `files` and `binary` read them, `images` makes the records, and
`stagerun.data.importing` the LMDB, since a run imports small folders, too. `records` verifies and describes LMDBs, `show` draws them.
"""
