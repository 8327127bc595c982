"""The methods of self-supervised learning. docs/extending.md shows how to add one.

A method is a section of the config (a `MethodSettings`, free of torch) that builds a `Method`: its networks, its loss and what
follows an update. Everything else knows methods only by these two classes.
"""
