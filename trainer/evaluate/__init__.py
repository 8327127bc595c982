"""Evaluation of a trained encoder: features, linear probe, k-NN, results."""
