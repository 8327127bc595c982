"""What is on disk, the plan of each step, and the views drawn from it."""
