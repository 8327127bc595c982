"""SwAV: predicts the assignment of another view to prototypes."""
