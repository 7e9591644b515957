"""Objects that this project stores on a user's modules, and the only function that reads them."""

from collections.abc import Callable
from typing import Any

from torch import nn


class ModelHandle(nn.Module):
    """A module for users that contains the model of analyses, such as the result of `attach`.

    A function that takes a model accepts a handle too. It uses the handle's `model`.
    """

    model: nn.Module


def without_handle(value: Any) -> Any:
    """Return the model of a `ModelHandle`; any other value unchanged.

    >>> without_handle("a")
    'a'
    """
    return value.model if isinstance(value, ModelHandle) else value


def carried(module: nn.Module, name: str) -> Any:
    """Return an object that `hooks` or `models` stored on a module; None if there is none.

    Args:
        module: the module.
        name: the attribute that contains the object. `hook_points` contains the points of an
            attached module, which are not its children. `language_parts` contains the parts of an
            attached model that analyses use. `shards` says how the value of a point is divided
            among the processes of a tensor-parallel model.
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


def name_of_parts(parts: object) -> str:
    """Return the name that errors use for the object with the parts of a model, such as `to_id`.

    The name is `model`, or `attached` for the parts of an attached model, because the model itself
    has other methods.

    Args:
        parts: the result of `language_of`.

    >>> name_of_parts(language_of(nn.Linear(2, 3)))
    'model'
    """
    return "attached" if isinstance(parts, ModelHandle) else "model"


def writer_of(model: nn.Module) -> Callable[[Any], Any] | None:
    """Return `model.to_pieces`, a function that takes tokens of any shape and returns their texts.

    The result is None for a model without a tokenizer, or if the files of the tokenizer cannot be
    read. Callers then show the numbers of tokens.

    >>> writer_of(nn.Linear(2, 3)) is None
    True
    """
    language = language_of(model)
    try:
        return None if getattr(language, "tokenizer", None) is None else language.to_pieces
    # A missing library or a damaged file of a tokenizer must not stop an analysis.
    except (ImportError, ValueError):
        return None
