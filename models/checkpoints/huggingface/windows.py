"""The window fields of a config, from the kind of attention that a file gives each layer."""

from collections.abc import Sequence
from typing import Any

from models.checkpoints.huggingface.family import Attributes

FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")


def windows(
    a: Attributes,
    window: int | None,
    types: Sequence[str],
    n_layers: int,
    kinds: tuple[str, str] = KINDS,
    spelled: tuple[str, str] = ("layer_types", "sliding_window"),
) -> dict[str, Any]:
    """The window fields of our config.

    Args:
        a: makes errors.
        window: how many positions a query sees in layers that have a window.
        types: the kind of attention in each layer.
        n_layers: the number of layers.
        kinds: the family's names of attention without and with a window.
        spelled: the family's names of `types` and `window`, for errors.

    Raises:
        ValueError: if there are other kinds, or not one for each layer, or a window is missing.
    """
    if len(types) != n_layers or any(kind not in kinds for kind in types):
        raise a.error(spelled[0], types, f"{n_layers} of {' and '.join(kinds)}")
    sliding = tuple(layer for layer, kind in enumerate(types) if kind == kinds[1])
    if not sliding:
        return {}
    if window is None or window < 1:
        raise a.error(spelled[1], window, f"at least 1 where there is {kinds[1]}")
    return {"window": window, "window_layers": () if len(sliding) == len(types) else sliding}
