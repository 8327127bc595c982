"""The settings of a run: schema, checks, loading."""
