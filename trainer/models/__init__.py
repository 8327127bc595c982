"""The networks: encoder, projector, BatchNorm."""
