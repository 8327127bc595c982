"""`wmse reproduce`: train and evaluate a recipe, and say whether its published figures were reached."""
