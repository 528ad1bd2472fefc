"""The machine that this process runs on, one module per kind of fact: processes, the host, files, lines of JSON.

Nothing here knows of schedules, snapshots or training, and nothing imports torch. It may be imported from everywhere but `errors` and
`text`, which it uses itself. A new fact about the machine goes into the module of its kind, and is read nowhere else.
"""
