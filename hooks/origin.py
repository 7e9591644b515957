"""Origin: the run and the model of a cache."""

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from hooks.base import config_hash, weights_hash
from hooks.base._torch import written
from hooks.base.errors import CacheError
from hooks.base.pieces import with_ends
from hooks.base.text import text_of_inputs
from hooks.base.transfer import private

_KEPT_INPUTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Origin:
    """The run and the model of a cache.

    Attributes:
        known: the names of all points of the model, in order.
        config_hash: the hash of the model's configuration.
        inputs: the tokens, masks and numbers among the arguments of the run, by name.
        hashed: the `weights_hash` of the model when the cache was saved or copied; otherwise empty.
        skipped: the chosen points without a value, each with the reason.
        is_part: whether texts or positions of the cache were selected. Then `inputs` still contain
            all texts and positions of the run.
        model: the model, as long as it exists.
        written: the number of writes to each parameter when the run ended; see `_torch.written`.

    >>> Origin(("embed",)).known
    ('embed',)
    """

    known: tuple[str, ...] = ()
    config_hash: str = ""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    hashed: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)
    is_part: bool = False
    # The reference is weak, because a cache may outlive its model.
    model: weakref.ref[nn.Module] | None = None
    written: Mapping[int, int] = field(default_factory=dict, repr=False)

    def weights_hash(self) -> str:
        """Return the hash of the weights that ran; empty if the weights are unknown."""
        model = None if self.model is None else self.model()
        if model is None or self._changed(model):
            return self.hashed
        return weights_hash(model)

    def _changed(self, model: nn.Module) -> str:
        """Return the name of a parameter that was written after the run; empty if there is none."""
        now = written(model)
        changed = {key for key, count in now.items() if self.written.get(key, count) != count}
        if not changed:
            return ""
        return next(name for name, weight in model.named_parameters() if id(weight) in changed)

    def require(self, model: nn.Module) -> None:
        """Check that a model has the same configuration and weights, as far as they are known.

        Raises:
            CacheError: if the configuration or the weights differ.
        """
        if self.model is not None and self.model() is model:
            if name := self._changed(model):
                raise CacheError(
                    "the cache must be of the model's present weights; got a cache of a run before "
                    f"{name} was changed: run the model again"
                )
            return
        for kind, ours, theirs in (
            ("config", self.config_hash, config_hash(model)),
            ("weights", hashed := self.weights_hash(), hashed and weights_hash(model)),
        ):
            if ours != theirs:
                raise CacheError(
                    f"the cache must be of a model with this model's {kind} hash, {theirs[:12]}; "
                    f"got {ours[:12]}: run this model again, or pass the model that ran"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        facts = (self.known, self.config_hash, self.inputs, self.weights_hash())
        return Origin, (*facts, self.skipped, self.is_part)


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of the model's `forward`, or None if Python does not know it."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def prepared(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a run, changed by the model's method `prepare_inputs` if it has one.

    For example, a model that accepts strings turns the strings into tokens in `prepare_inputs`. A
    cache can then store the tokens.
    """
    prepare = getattr(model, "prepare_inputs", None)
    return prepare(*args, **kwargs) if callable(prepare) and (args or kwargs) else (args, kwargs)


def inputs_of(signature: inspect.Signature | None, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return a run's arguments by the parameter names of `forward`.

    Keywords in `**kwargs` keep their names. The result contains copies of masks (arguments whose
    name ends in `mask`) and of tensors without floating-point numbers, and None, numbers and
    strings. Other arguments are left out. If the arguments do not fit the signature, the result is
    empty.

    Args:
        signature: the signature of `forward`; None if Python does not know it.
        args, kwargs: the arguments of the run.

    >>> class Scaled(nn.Module):
    ...     def forward(self, tokens, scale=1.0): ...
    >>> inputs_of(signature_of(Scaled()), (3,), {"scale": 0.5})
    {'tokens': 3, 'scale': 0.5}
    """
    try:
        arguments = {} if signature is None else signature.bind(*args, **kwargs).arguments
    # The run of the model will raise an error that explains the problem.
    except TypeError:
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
    """Return whether an argument is a mask, by its name."""
    return name.endswith("mask")


class JoinedInputs:
    """The arguments that one run of the whole text would have, from the runs of a generation.

    A generation runs the model once for each new token. `joined` returns

    1. tensors [batch, pos], such as tokens, of all runs, joined along the positions;
    2. the mask of the last run, which covers all columns so far. It is False after the end of a row
       that ended before the others;
    3. numbers and strings that were the same in all runs.

    Args:
        model: the model.
        signature: the signature of its `forward`.
    """

    def __init__(self, model: nn.Module, signature: inspect.Signature | None) -> None:
        self._model = model
        self._signature = signature
        self._runs: list[dict[str, Any]] = []

    def note(self, args: Any, kwargs: Any) -> None:
        """Store the arguments of a run. This is a hook before the model's forward."""
        args, kwargs = prepared(self._model, args, kwargs)
        self._runs.append(inputs_of(self._signature, args, kwargs))

    def joined(
        self,
        new: Shaped[Tensor, "batch _new"] | None = None,
        mask: Shaped[Tensor, "batch _key"] | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of all runs together, by the parameter names of `forward`.

        Args:
            new: the mask of the last columns, if a row ended before the others; see
                `RowEnds.new_columns`. The result then has an `attention_mask`.
            mask: the mask of the last run, if the run got it in another form; see `RowEnds.mask`.
        """
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
        if mask is not None:
            inputs["attention_mask"] = private(mask)
        texts = text_of_inputs(inputs)
        if new is not None and texts is not None:
            real = inputs.get("attention_mask", torch.ones_like(texts.tokens, dtype=torch.bool))
            inputs["attention_mask"] = with_ends(real, new)
        return inputs


def _are_equal_numbers(values: list[Any]) -> bool:
    """Return whether all values are the same number, the same string or None."""
    return all(isinstance(value, _KEPT_INPUTS) and value == values[0] for value in values)


def _are_columns(values: list[Any]) -> bool:
    """Return whether values are tensors [batch, pos] with the same batch."""
    are_tensors = all(isinstance(value, Tensor) and value.ndim == 2 for value in values)
    return are_tensors and len({len(value) for value in values}) == 1
