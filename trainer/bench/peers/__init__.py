"""Compare parts of this program with what others use: loaders, losses, optimizers."""
