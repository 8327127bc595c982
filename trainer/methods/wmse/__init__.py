"""W-MSE: whitens the embeddings, then measures the distance between the views of an image."""
