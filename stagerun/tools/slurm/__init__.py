"""`stagerun sbatch`: a run in Slurm's allocations, as many as it takes. `script` writes the batch script; pure."""
