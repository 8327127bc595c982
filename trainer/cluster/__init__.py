"""Runs on a cluster: `wmse launch`, `wmse status`, `wmse stop`, and SLURM."""
