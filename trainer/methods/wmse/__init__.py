"""W-MSE: whitening, then the distance between the views of one image."""
