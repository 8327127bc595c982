"""`wmse report`: one HTML page with the curves, figures and pictures of runs."""
