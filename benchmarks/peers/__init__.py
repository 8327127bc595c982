"""What others would use in place of our loader, loss and optimizer, beside ours in one run: python -m benchmarks.peers."""
