"""Settings of a run: declaration, checks, loading."""
