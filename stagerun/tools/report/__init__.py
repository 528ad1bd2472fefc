"""`stagerun report`: tables of runs, from their logs and snapshots.

`replay` reads a log into the values of `history`, `look` adds what its folder holds; `tables` shows runs, `compare` and `effects` several.
"""
