"""Checks of this installation against plain definitions, on the user's own machine: `wmse verify`."""
