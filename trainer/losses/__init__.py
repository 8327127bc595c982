"""Pure loss functions of tensors, one for each method."""
