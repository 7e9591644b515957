"""Warnings where a dictionary is used at another place than the one that it was trained at.

1. The files of a dictionary name the place. If this model has no such point, only its layer counts.
2. The stream after a block is the stream before the next block. So the two names are one place.
3. Other points may have the same value too, such as `embed` and `blocks.0.resid_pre` without position
   encodings. So the model runs on a few tokens before a warning.
"""

import re
from collections.abc import Mapping

from torch import nn

from hooks import Point
from hooks.base import layer_of, warn
from hooks.shared import names_by_layer
from interp.features.forms.places import have_one_value, point_at

_AFTER_BLOCK = re.compile(r"(.*\bblocks\.)(\d+)\.resid_post")


def warn_of_place(
    model: nn.Module, points: Mapping[str, Point], *pairs: tuple[str | None, str]
) -> None:
    """Warn, once, if a dictionary is used at a point that is known to be another place.

    Args:
        model: the model.
        points: the points of the model.
        pairs: a place that the dictionary was trained at, None if unknown, and the name of the
            point that is used for it. A transcoder has two pairs: where it writes, and what it reads.
    """
    wrong = [
        (place, point)
        for place, point in dict.fromkeys(pairs)  # of an autoencoder, both pairs are the same
        if place and not _may_be_at(place, point, model, points)
    ]
    if wrong:
        places, here = (" and ".join(dict.fromkeys(names)) for names in zip(*wrong, strict=True))
        warn(
            f"the dictionary was trained at {places} and is used at {here}, which has other "
            "values: its features may mean nothing there"
        )


def _may_be_at(place: str, point: str, model: nn.Module, points: Mapping[str, Point]) -> bool:
    """Whether a place has the value of a point, or nobody knows."""
    known = point if point == place else point_at(place, model, points)
    layer, last = layer_of(point), known.removeprefix("blocks.*.")
    if layer is not None and any(name.endswith(f".{last}") for name in points):
        # Dictionaries across layers name a point without its block.
        known = names_by_layer(last, points).get(layer, known)
    if _as_entering(known) == _as_entering(point):
        return True
    if known in points:
        return have_one_value(known, point, model)
    return layer_of(known) in (None, layer) or layer is None


def _as_entering(name: str) -> str:
    """The name of a point. The stream after a block gets the name of the stream before the next."""
    match = _AFTER_BLOCK.fullmatch(name)
    return f"{match[1]}{int(match[2]) + 1}.resid_pre" if match else name
