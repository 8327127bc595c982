"""Self-supervised pre-training of image encoders by whitening (W-MSE)."""

__version__ = "0.1.0"
