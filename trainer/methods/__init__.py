"""Methods of self-supervised learning. docs/extending.md shows how to add one.

A method consists of a section of the config (a `MethodSettings`, which needs no torch) and a class (a `Method`) with its
networks, its loss, and its changes after an update. The rest of the program only uses these two interfaces.
"""
