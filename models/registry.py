"""Named configs, such as the configs of GPT-2, from configs.json.

`build("gpt2")` returns a model with a named config, and `register("name")` adds a config.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hooks.base import unknown_name, warn
from models.config import TransformerConfig
from models.transformer import Transformer

Describe = Callable[[], TransformerConfig]

_GROUPS: Sequence[Any] = json.loads(
    Path(__file__).with_name("configs.json").read_text(encoding="utf-8")
)

ON_HUB = frozenset(name for group in _GROUPS if "is_on_hub" in group for name in group["models"])
"""Names of configs that are also names of models on the hub."""


def _configs_of_file() -> dict[str, TransformerConfig]:
    """Return the configs in configs.json by name."""
    configs: dict[str, TransformerConfig] = {}
    for group in _GROUPS:
        for name, sizes in group["models"].items():
            configs[name] = TransformerConfig(**group["fields"], **sizes)
    return configs


# `register` adds to this dictionary, because a name must have the same config in the whole program.
_configs = _configs_of_file()


def register(name: str) -> Callable[[Describe], Describe]:
    """Return a decorator that registers the config of a function, for `build` and `config_of`.

    Registering a name again replaces its config, with a warning.

    Args:
        name: the name of the config.

    Returns:
        The decorator, which returns the decorated function itself.

    Raises:
        ValueError: if the decorated object is not a function that returns a `TransformerConfig`.

    >>> @register("two-layers")
    ... def two_layers() -> TransformerConfig:
    ...     return TransformerConfig(vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> build("two-layers", n_layers=3).config.n_layers
    3
    """

    def add(describe: Describe) -> Describe:
        config = describe() if callable(describe) else describe
        if not isinstance(config, TransformerConfig):
            raise ValueError(
                f"{name!r} must be a function that returns a TransformerConfig; got {describe!r}"
            )
        if name in _configs:
            warn(f"{name!r} was registered already and is replaced")
        _configs[name] = config
        return describe

    return add


def list_configs() -> list[str]:
    """Return the registered names, in order of registration.

    Returns:
        The names, for `build` and `config_of`.

    >>> list_configs()[:2]
    ['gpt2', 'gpt2-medium']
    """
    return list(_configs)


def config_of(name: str, **overrides: Any) -> TransformerConfig:
    """Return the config that is registered under a name, with some fields changed.

    Derived sizes, such as `d_mlp` from `d_model`, are derived again.

    Args:
        name: the name of the config, one of `list_configs()`.
        overrides: fields of `TransformerConfig` with other values.

    Returns:
        The config. Fields that are not in `overrides` have their registered values.

    Raises:
        UnknownNameError: if the name (see `list_configs`) or a field is unknown. It is a KeyError
            with close matches.
        ValueError: if an override is not allowed.

    >>> config_of("gpt2", n_heads=6).d_head
    128
    """
    if name not in _configs:
        raise unknown_name(name, _configs, "config of models.list_configs()")
    config = _configs[name]
    for field in overrides.keys() - config.__dataclass_fields__.keys():
        raise unknown_name(field, config.__dataclass_fields__, "field of a config")
    return config.replace(**overrides)


def build(name: str, **overrides: Any) -> Transformer:
    """Return a model with new random weights from a registered config.

    Args:
        name: the name of the config, one of `list_configs()`.
        overrides: fields of `TransformerConfig` with other values.

    Returns:
        The model, in training mode.

    Raises:
        UnknownNameError: if the name or a field is unknown; see `config_of`.
        ValueError: if an override is not allowed.

    >>> model = build("gpt2", vocab_size=7, n_ctx=5, n_layers=2, n_heads=1, d_model=4)
    >>> model.W_Q.shape, model.config.activation  # new sizes, and the activation of GPT-2
    (torch.Size([2, 1, 4, 4]), 'gelu_tanh')
    """
    return Transformer(config_of(name, **overrides))
