"""`import stagerun`: what the commands do, for Python and notebooks. A new name is a function here, and a row in `stagerun/__init__.py`.

Thin: each calls what its command calls. Nothing prints, handles a signal or ends the process.
"""
