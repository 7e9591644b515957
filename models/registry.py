"""Named configs: `build("gpt2")` makes a fresh model, `register("name")` adds a name."""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from models.config import TransformerConfig
from models.transformer import Transformer

Describe = Callable[[], TransformerConfig]

_configs: dict[str, Describe] = {}


def register(name: str) -> Callable[[Describe], Describe]:
    """Decorates a function that returns a config, so that `build` and `config_of` know its name.

    Raises:
        ValueError: if the name is taken.

    >>> @register("two-layers")
    ... def two_layers() -> TransformerConfig:
    ...     return TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> build("two-layers", n_layers=3).config.n_layers
    3
    """
    if name in _configs:
        raise ValueError(f"a config is registered as {name!r} already")

    def add(describe: Describe) -> Describe:
        _configs[name] = describe
        return describe

    return add


def available() -> list[str]:
    """The registered names, in the order in which they were registered."""
    return list(_configs)


def config_of(name: str, **overrides: Any) -> TransformerConfig:
    """The config registered under a name, with some fields changed.

    Sizes that followed from others (`d_mlp` from `d_model`, for instance) follow the new ones.

    Raises:
        KeyError: if there is no such name; it lists close matches and all names.
        ValueError: if an override is not allowed, or there is no such field.
    """
    if name not in _configs:
        close = get_close_matches(name, _configs, n=3)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise KeyError(f"no config is named {name!r}; {hint}available: {', '.join(_configs)}")
    config = _configs[name]()
    unknown = sorted(overrides.keys() - config.__dataclass_fields__.keys())
    if unknown:
        raise ValueError(f"a config has no field {', '.join(unknown)}")
    return config.replace(**overrides)


def build(name: str, **overrides: Any) -> Transformer:
    """A model with fresh weights, from a registered config; arguments and errors as for `config_of`."""
    return Transformer(config_of(name, **overrides))
