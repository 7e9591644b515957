"""Rotary frequencies that depend on the longest text of a batch, as in models of `transformers`.

With `dynamic` and `longrope`, a model computes its rotary frequencies anew in each run:

- `longrope` has two sets of frequencies: one for runs of at most n tokens, and one for longer runs.
- `dynamic` computes the frequencies of a run of more than n tokens from its length.

The length of a run is the length of its longest text. So a text gets the numbers that it has alone
only if the run is in its group of lengths (`RotaryLengths.group`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from hooks.base import padding_messages


class RotaryLengths(NamedTuple):
    """The lengths at which the rotary frequencies of a model change.

    Attributes:
        kind: the name of the model's class, for messages.
        longrope: for each module with `longrope`, the largest length with the first frequencies.
        dynamic: for each module with `dynamic`, the largest length whose frequencies do not depend
            on the length.
    """

    kind: str
    longrope: tuple[int, ...] = ()
    dynamic: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> "RotaryLengths":
        """Return the lengths of a model, from the modules that compute its frequencies."""
        longrope = set[int]()
        dynamic = set[int]()
        modules: list[Any] = [*model.modules()]
        for module in modules:
            for name, settings in _rotary_settings(module):
                if name == "longrope":
                    longrope.add(int(settings["original_max_position_embeddings"]))
                elif "dynamic" in name:
                    dynamic.add(int(module.original_max_seq_len))
        return cls(type(model).__name__, tuple(sorted(longrope)), tuple(sorted(dynamic)))

    @property
    def depend_on_runs(self) -> bool:
        """True if the frequencies depend on the length of a run."""
        return bool(self.longrope or self.dynamic)

    def group(self, length: int) -> tuple[int, ...]:
        """Return the group of a text: texts of one group have the same frequencies in one run."""
        sides = [length > most for most in self.longrope]
        return (*sides, *(max(length, most) for most in self.dynamic))

    def message(self, lengths: Sequence[int], longest: int) -> str | None:
        """Return the message for texts that get other frequencies than alone; None without them.

        Args:
            lengths: the number of tokens of each text.
            longest: the number of positions of the run. It is larger than all lengths if some
                columns are padding in all texts.
        """
        group = self.group(longest)
        if all(self.group(length) == group for length in lengths):
            return None
        most = (*self.longrope, *self.dynamic)[0]
        return padding_messages.different_frequencies(self.kind, most, bool(self.dynamic))


def _rotary_settings(module: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the kind of the rotary frequencies of a module, with its settings in the config.

    A module may have a kind for each type of layer. Nothing is yielded for other modules.
    """
    kinds = getattr(module, "rope_type", None)
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    if isinstance(kinds, str):
        yield kinds, parameters
    elif isinstance(kinds, dict):
        for layer_type, kind in kinds.items():
            yield str(kind), parameters.get(layer_type) or {}
