"""Monitors: a small process beside each worker, which sees that it hangs, names it, and ends the job.

It starts with every worker, so what it imports is kept small: nothing is imported here.
"""
