"""Training: torch, and nothing of disk, plan or terminal."""
