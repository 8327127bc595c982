"""Alignment and uniformity of embeddings, with the networks and the queue of MoCo."""
