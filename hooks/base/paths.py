"""Names of modules: the number of the layer among the parts of a path."""

import re

# The first number among the parts of a name.
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def layer_of(name: str) -> int | None:
    """The first number among the parts of `name`, or None.

    >>> layer_of("blocks.3.attn.q")
    3
    """
    number = LAYER.search(name)
    return int(number.group()) if number else None
