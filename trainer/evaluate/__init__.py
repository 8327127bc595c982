"""What was learnt: features, linear probe, k-NN, report."""
