"""The whitening operation: one call for all slices."""
