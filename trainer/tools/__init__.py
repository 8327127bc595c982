"""Commands around training: dry run, preview, demo."""
