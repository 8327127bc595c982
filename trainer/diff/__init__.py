"""`wmse diff`: where two runs part, and why."""
