"""The machine that this process runs on, one module per subject: processes, the host, files, lines of JSON.

Modules here don't depend on training, and don't import torch; all folders but `base` may import them. A new fact about the machine goes into
the module of its subject, and is read nowhere else.
"""
