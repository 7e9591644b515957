"""The error of a model that `attach` cannot read: it names the module, and says what the user can do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hooks import HookError

WITHOUT_ATTACH = "use HookedRunner(model) without attach, whose points are the modules"
ADVICE = f"name blocks=, attn= and mlp=, give example=, or {WITHOUT_ATTACH}"


class AttachError(ValueError):
    """A model cannot be attached; the message says why."""


@contextmanager
def reading(model: Any, name: str) -> Iterator[None]:
    """A `with` in which errors say which part of a model could not be read.

    A model of another kind may break any step, so any error may come. An `AttachError` stays, because it says more, and so do
    errors of memory and warnings that the user turned into errors.

    Args:
        model: the model.
        name: the module that is read; empty for the model itself.

    Raises:
        AttachError: naming the module.
    """
    try:
        yield
    except (AttachError, MemoryError, torch.OutOfMemoryError, Warning):
        raise
    except Exception as error:
        part = f"{name!r} of a {type(model).__name__}" if name else f"a {type(model).__name__}"
        raise AttachError(
            f"attach must know what each module does, and cannot read {part}: {brief(error)} ({ADVICE})"
        ) from error


def brief(error: Exception) -> str:
    """An error as one line; one of this package without its advice, which is for callers of other functions.

    >>> brief(KeyError("blocks"))
    "KeyError: 'blocks'"
    >>> brief(HookError("embed fired twice; a cache keeps one value per name (calls='all' keeps each)"))
    'HookError: embed fired twice; a cache keeps one value per name'
    """
    line = " ".join(str(error).split())
    if isinstance(error, HookError) and line.endswith(")"):
        line = line.rpartition(" (")[0] or line
    return f"{type(error).__name__}: {line[:300]}"
