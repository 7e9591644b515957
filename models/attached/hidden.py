"""The hidden layer of an MLP: what its nonlinearity makes new, and what a later map reads."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from models.attached.norms import norm_of
from models.attached.probe import Call
from models.attached.sums import is_close, is_same


class Hidden(NamedTuple):
    """The modules of a hidden layer.

    Attributes:
        act, post: the nonlinearity, and the map that reads what it makes.
        linear: the module whose output the nonlinearity's is multiplied with; None without a gate.
    """

    act: nn.Module
    post: nn.Module
    linear: nn.Module | None = None


def hidden_of(
    added: Call, calls: Sequence[Call], others: Sequence[Call], attention: nn.Module | None
) -> Hidden | None:
    """The hidden layer of an MLP; None if it does not show.

    Args:
        added: the call that gives what the MLP adds.
        calls: those of the block.
        others: those that give what other sublayers add.
        attention: the module that attends, which has no part in it.
    """
    began = max([call.ended for call in others if call.ended < added.began], default=-1)
    attending = [c for c in calls if c.module is attention]
    inside = [
        c
        for c in calls
        if began < c.began <= added.ended and not any(is_in(c, a) for a in attending)
    ]
    hidden = None
    for call in inside:
        if _is_nonlinearity(call, added):
            hidden = _around(call, inside, added) or hidden
    return hidden


def is_in(inner: Call, outer: Call) -> bool:
    """Whether one call is part of another, or the same."""
    return outer.began <= inner.began and inner.ended <= outer.ended


def _is_nonlinearity(call: Call, added: Call) -> bool:
    """Whether the module has no weights and computes something new of the same shape, but no norm."""
    x, y = call.inputs[0] if call.inputs else None, call.output
    if x is None or y is None or x.shape != y.shape:
        return False
    if added.output is None or x.shape[:2] != added.output.shape[:2]:
        return False
    plain = all(weight.numel() == 1 for weight in call.module.parameters())
    # What hands on its input, as dropout does, computes nothing that could be rounded.
    return plain and not is_same(x, y) and norm_of(call) is None


def _around(act: Call, calls: Sequence[Call], added: Call) -> Hidden | None:
    """The hidden layer of a nonlinearity."""
    y = act.output
    assert y is not None
    for last in calls:
        hidden = last.inputs[0] if last.inputs else None
        has_weights = any(True for _ in last.module.parameters())
        if hidden is None or last.began < act.ended or not has_weights or hidden.shape != y.shape:
            continue
        # Where others add to it, as experts may, these are not all neurons. Without them it is the same tensor.
        if not any(is_same(last.output, whole) for whole in (added.output, *added.inputs)):
            continue
        linear = None
        for other in calls:
            u = other.output
            is_factor = u is not None and u.shape == y.shape and other is not act
            if is_factor and u is not None and is_close(y * u, hidden) and not is_same(y, hidden):
                linear = other.module
        return Hidden(act.module, last.module, linear)
    return None
