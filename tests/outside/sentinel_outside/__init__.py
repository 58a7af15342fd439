"""Written as a stranger would, who has read the docs and nothing else."""
