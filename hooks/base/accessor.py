"""The only accessor of objects that another package attached to a module."""

from collections.abc import Callable
from typing import Any

from torch import nn


def carried(module: nn.Module, name: str) -> Any:
    """Return an object that this package stored on a module; None if there is no such object.

    Args:
        module: the module.
        name: the attribute that contains the object: `hook_points` for the points of an attached
            module that are not its children, `language_parts` for the parts of an attached model
            that analyses use, or `shards` for the division of a point's value among processes.
    """
    return vars(module).get(name)


def language_of(model: nn.Module) -> Any:
    """Return the parts of a model for analyses.

    These are the `language_parts` of an attached model. For any other model, the result is the
    model itself.

    >>> model = nn.Linear(2, 3)
    >>> language_of(model) is model
    True
    """
    return carried(model, "language_parts") or model


def writer_of(model: nn.Module) -> Callable[[Any], Any] | None:
    """Return `model.to_pieces`, a function from tokens of any shape to their texts.

    The result is None for a model without a tokenizer.

    >>> writer_of(nn.Linear(2, 3)) is None
    True
    """
    language = language_of(model)
    try:
        return None if getattr(language, "tokenizer", None) is None else language.to_pieces
    # The files of the tokenizer cannot be read. Token numbers are shown instead.
    except (ImportError, ValueError):
        return None
