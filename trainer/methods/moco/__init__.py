"""MoCo v2: the contrastive loss with a queue of keys from a slowly moving network."""
