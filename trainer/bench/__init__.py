"""Measure the parts of training: a file for each kind of `wmse bench`, and what they share."""
