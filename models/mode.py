"""mode: training or evaluation mode, for as long as a block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode; each module gets its own back."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
