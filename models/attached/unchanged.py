"""The modules and numbers of an attached model that must not change after `attach`.

`attach` reads from one run of the model which modules compute the values at points, and by which
numbers the model multiplies. If one of them changes later, points and readings would silently use
the old one. So each run and each reading of logits compares them with the model (`Unchanged`).
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from hooks import HookError

_OF_TRAINING = ("drop", "init", "loss", "jitter")
"""Parts of the names of numbers that only training uses."""
_OF_FACTORS = ("logit", "multiplier")
"""Parts of the names of factors and caps that may be whole numbers or None."""


class Unchanged:
    """The modules and numbers of a model when it was attached.

    Attributes:
        modules: (parent, name, module) for each module on the way from the model to a module that
            `attach` uses. `name` is the name of the module in its parent.
        numbers: (owner, name, value) for each number by which a module or a config may multiply,
            such as the epsilon of a norm, a factor of the stream, or a cap of the logits.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[nn.Module, str, nn.Module]] = []
        self.numbers: list[tuple[Any, str, Any]] = []

    def note_modules(
        self, model: nn.Module, used: Collection[nn.Module], attention: Collection[nn.Module]
    ) -> None:
        """Store modules, the modules that contain them, and the numbers of all these modules.

        Args:
            model: the model.
            used: the modules that `attach` uses.
            attention: the modules that attend. Their numbers are read in each run, so they may
                change.
        """
        names = {name for name, module in _named(model) if module in used}
        on_the_way = set[str]()
        for name in names:
            parts = name.split(".")
            on_the_way.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
        modules = dict(_named(model))
        for name in on_the_way - {""}:
            parent, _, last = name.rpartition(".")
            self.modules.append((modules[parent], last, modules[name]))
        for module in dict.fromkeys([model, *(modules[name] for name in on_the_way)]):
            if module not in attention:
                self.note_numbers(module)

    def note_numbers(self, owner: Any) -> None:
        """Store the numbers of a module or a config."""
        for name, value in vars(owner).items():
            is_factor = isinstance(value, float) or any(part in name for part in _OF_FACTORS)
            # A switch, such as `output_router_logits`, may change.
            is_number = value is None or type(value) in (int, float)
            if is_factor and is_number and not any(part in name for part in _OF_TRAINING):
                self.numbers.append((owner, name, value))

    def changed_module(self) -> str | None:
        """Return the sentence for a module that was replaced; None if there is none."""
        for parent, name, module in self.modules:
            if getattr(parent, name, None) is not module:
                return (
                    f"the model's modules must not change after attach; {name!r} of a "
                    f"{type(parent).__name__} was replaced"
                )
        return None

    def changed_number(self) -> str | None:
        """Return the sentence for a number that has changed; None if there is none."""
        for owner, name, value in self.numbers:
            new = getattr(owner, name, None)
            if new is not value and new != value:
                return (
                    f"the model's numbers must not change after attach; {name!r} of a "
                    f"{type(owner).__name__} changed from {value!r} to {new!r}"
                )
        return None

    def change(self) -> str | None:
        """Return the sentence for a change; None if nothing has changed."""
        return self.changed_module() or self.changed_number()

    def require(self) -> None:
        """Require a model that has not changed.

        Raises:
            HookError: if a module was replaced, as adapters do, or if a number has changed.
        """
        raise_for(self.change())


def raise_for(change: str | None) -> None:
    """Raise the error for a change.

    Raises:
        HookError: if there is a change. The error contains its sentence.
    """
    if change is not None:
        raise HookError(f"{change}: call attach(model) again")


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return each module under each of its names."""
    return [*model.named_modules(remove_duplicate=False)]
