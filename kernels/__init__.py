"""The whitening operation, one call for all slices, and LARS by Triton kernels."""
