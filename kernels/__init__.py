"""The whitening operation, which processes all slices in one call, and LARS as Triton kernels."""
