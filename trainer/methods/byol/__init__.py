"""BYOL: predicts the embedding of a target network, whose weights are a moving average."""
