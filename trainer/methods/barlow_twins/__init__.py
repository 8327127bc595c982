"""Barlow Twins: decorrelates the dimensions of the embeddings across views."""
