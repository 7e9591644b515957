"""The mode of a model: training or evaluation, for the time of a `with`."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets training or evaluation mode, and restores the mode of each module afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
