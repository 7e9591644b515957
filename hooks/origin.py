"""Origin: the run and the model that a cache comes from."""

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import config_hash, weights_hash
from hooks.base.errors import CacheError
from hooks.base.transfer import private

_KEPT_INPUTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Origin:
    """The run and the model that a cache comes from.

    Attributes:
        known: the names of all points of the model, in order.
        config_hash: the hash of its configuration.
        inputs: what the run was given; see `inputs_of`.
        hashed: `weights_hash` of a model that is no longer at hand; empty where it is not known.
        skipped: why chosen points have no value, by name.
        is_part: whether the cache was cut since, so that `inputs` are of more than its values.
        model: the model, as long as it lives.

    >>> Origin(("embed",)).known
    ('embed',)
    """

    known: tuple[str, ...] = ()
    config_hash: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    hashed: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)
    is_part: bool = False
    # Weak, because a cache may outlive its model.
    model: weakref.ref[nn.Module] | None = None

    def weights_hash(self) -> str:
        """The hash of the model's weights as they are now; empty where nothing is known of them."""
        model = None if self.model is None else self.model()
        return self.hashed if model is None else weights_hash(model)

    def require(self, model: nn.Module) -> None:
        """Refuse a model that is known to have another configuration or other weights.

        Raises:
            CacheError: if it has.
        """
        if self.model is not None and self.model() is model:
            return
        for what, ours, theirs in (
            ("config", self.config_hash, config_hash(model)),
            ("weights", hashed := self.weights_hash(), hashed and weights_hash(model)),
        ):
            if ours != theirs:
                raise CacheError(
                    f"the cache must be of a model with this model's {what} hash, {theirs[:12]}; "
                    f"got {ours[:12]}: run this model again, or give the model that ran"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.known, self.config_hash, self.inputs, self.weights_hash())
        return Origin, (*facts, self.skipped, self.is_part)


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """The signature of the model's `forward`; None where Python knows none."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def prepared(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a run as the model's own `prepare_inputs(*args, **kwargs)` gives them, if it has one.

    A model that reads strings makes tensors of them there, so that a cache can keep what was read.
    """
    prepare = getattr(model, "prepare_inputs", None)
    return prepare(*args, **kwargs) if callable(prepare) and (args or kwargs) else (args, kwargs)


def inputs_of(signature: inspect.Signature | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """A run's arguments by the names of `forward`. Further keywords keep their own names.

    Tensors that are masks by name, or not of floating-point numbers, are copied; other tensors are left out.
    None, numbers and strings are kept. If the arguments do not fit the signature, there are none.

    >>> class Scaled(nn.Module):
    ...     def forward(self, tokens, scale=1.0): ...
    >>> inputs_of(signature_of(Scaled()), (3,), {"scale": 0.5})
    {'tokens': 3, 'scale': 0.5}
    """
    try:
        arguments = {} if signature is None else signature.bind(*args, **kwargs).arguments
    except TypeError:  # the run itself says what is wrong
        return {}
    for parameter in signature.parameters.values() if signature else ():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    inputs: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, _KEPT_INPUTS):
            inputs[name] = value
        elif isinstance(value, Tensor) and (_is_mask(name) or not value.is_floating_point()):
            inputs[name] = private(value)
    return inputs


def _is_mask(name: str) -> bool:
    return name.endswith("mask")


class JoinedInputs:
    """The arguments of all runs of a model inside a function, as if one run had covered all positions.

    A generation runs the model once for each new token. Of each argument this keeps:

    1. the integers [batch, pos] of all runs, joined along the positions, such as tokens;
    2. the last mask, which covers all columns so far;
    3. numbers and strings that were the same in all runs.

    Args:
        model: the model.
        signature: the signature of its `forward`.
    """

    def __init__(self, model: nn.Module, signature: inspect.Signature | None) -> None:
        self._model, self._signature = model, signature
        self._runs: list[dict[str, Any]] = []

    def note(self, args: Any, kwargs: Any) -> None:
        """Keep the arguments of a run; a hook before the model's forward."""
        args, kwargs = prepared(self._model, args, kwargs)
        self._runs.append(inputs_of(self._signature, args, kwargs))

    def joined(self) -> dict[str, Any]:
        """Return the arguments of all runs together, by the names of `forward`."""
        if not self._runs:
            return {}
        inputs: dict[str, Any] = {}
        last = self._runs[-1]
        for name in last:
            values = [run[name] for run in self._runs if name in run]
            if _is_mask(name):
                inputs[name] = last[name]
            elif len(values) == len(self._runs) and _are_columns(values):
                inputs[name] = torch.cat(values, 1)
            elif len(values) == len(self._runs) and _are_equal_numbers(values):
                inputs[name] = values[0]
        return inputs


def _are_equal_numbers(values: list[Any]) -> bool:
    """Return whether values are one number, string or None."""
    return all(isinstance(value, _KEPT_INPUTS) and value == values[0] for value in values)


def _are_columns(values: list[Any]) -> bool:
    """Return whether values are tensors [batch, pos] of one batch."""
    are_tensors = all(isinstance(value, Tensor) and value.ndim == 2 for value in values)
    return are_tensors and len({len(value) for value in values}) == 1
