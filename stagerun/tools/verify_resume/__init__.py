"""`stagerun verify-resume`: a short run killed at random moments must end in the same bits. `verdict` compares the ends; `interruption`
interrupts.
"""
