"""What must be right before many machines are paid for: facts of each host, what was measured on them, and the verdict."""
