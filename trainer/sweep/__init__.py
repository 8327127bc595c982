"""`wmse sweep`: a table of experiments, each an ordinary run that is trained and evaluated."""
