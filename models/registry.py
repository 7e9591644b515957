"""Named configs: `build("gpt2")` makes a fresh model, `register("name")` adds a name."""

from collections.abc import Callable
from typing import Any

from hooks.errors import unknown_name
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
        UnknownNameError: if there is no such name (see `available`) or field; a KeyError, with close
            matches.
        ValueError: if an override is not allowed.
    """
    if name not in _configs:
        raise unknown_name(name, _configs, "config of models.available()")
    config = _configs[name]()
    for field in overrides.keys() - config.__dataclass_fields__.keys():
        raise unknown_name(field, config.__dataclass_fields__, "field of a config")
    return config.replace(**overrides)


def build(name: str, **overrides: Any) -> Transformer:
    """A model with fresh weights, from a registered config; arguments and errors as for `config_of`."""
    return Transformer(config_of(name, **overrides))
