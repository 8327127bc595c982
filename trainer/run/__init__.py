"""A run on disk and in time: folder, checkpoints, faults, signals, state."""
