"""Training: torch, and nothing of disk, plan or terminal. Values come in, events go out.

`loop` is a generator of events over the iterations of a stage; `update` is one weight update, `state` all that a snapshot holds. A solver type
is a class and a row in `solvers`.
"""
