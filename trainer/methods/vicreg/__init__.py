"""VICReg: variance, invariance and covariance of the embeddings."""
