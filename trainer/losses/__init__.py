"""Pure loss functions, one a file: shapes in, scalar out."""
