"""Commands beside training: dry run, preview, demo."""
