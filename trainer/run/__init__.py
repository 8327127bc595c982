"""Life of a run: its folder, checkpoints, faults, signals and state."""
