"""Names of modules: the layer number in a path."""

import re

# Find the first number among the parts of a name.
LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def layer_of(name: str) -> int | None:
    """Return the first number among the parts of `name`, or None.

    >>> layer_of("blocks.3.attn.q")
    3
    """
    number = LAYER.search(name)
    return int(number.group()) if number else None
