"""Encoder, projector, BatchNorm, compilation, and the state that no optimizer changes."""
