"""The one accessor of the objects that another package left on a module."""

from collections.abc import Callable
from typing import Any

from torch import nn


def carried(module: nn.Module, name: str) -> Any:
    """Return a thing that a module carries beside its own attributes; None if there is none.

    `hook_points` are points that fire while it runs, `language_parts` what analyses use of an attached model, `shards` how
    a value is divided among processes.
    """
    return vars(module).get(name)


def language_of(model: nn.Module) -> Any:
    """Return the parts of a model that analyses use: those that an attached model carries, or the model itself.

    >>> model = nn.Linear(2, 3)
    >>> language_of(model) is model
    True
    """
    return carried(model, "language_parts") or model


def writer_of(model: nn.Module) -> Callable[[Any], Any] | None:
    """Return the function that gives the text of tokens of any shape, `model.to_pieces`; None without a tokenizer.

    >>> writer_of(nn.Linear(2, 3)) is None
    True
    """
    language = language_of(model)
    try:
        return None if getattr(language, "tokenizer", None) is None else language.to_pieces
    except (ImportError, ValueError):  # its files cannot be read, and numbers do as well
        return None
