"""Training or evaluation mode of a model inside a `with` statement."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set training or evaluation mode, and restore the mode of each module at the end.

    A module that was added to the model in the meantime gets the mode of the model.
    """
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        _, model_was_training = before[0]
        for module in model.modules():
            module.training = model_was_training
        for module, was_training in before:
            module.training = was_training
