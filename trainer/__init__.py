"""Self-supervised pre-training of image encoders: W-MSE (whitening) and other methods."""

__version__ = "0.1.0"
