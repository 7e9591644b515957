"""Linear maps that readings share: the map of a lens, and heads' weights with norms folded in.

Neither file imports the other.
"""
