"""Configs of an attached model: its own copies, so that models that share them are not affected."""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hooks.base import library

Kernel = Callable[..., tuple[Tensor, Any]]
"""An attention function of `transformers`. It returns z, [batch, query, head, d_head], and weights or None."""

HOOKED = "hooked_"
"""Before the name of the model's own kernel: `transformers` knows `hooked_attention` by these names."""


def configs_of(model: nn.Module) -> dict[nn.Module, Any]:
    """The config of each module that has one."""
    held = {module: vars(module).get("config") for module in model.modules()}
    return {module: config for module, config in held.items() if _is_config(config)}


def own_configs(model: nn.Module) -> dict[nn.Module, tuple[Any, Any]]:
    """Gives every module of the model a copy of its config that asks for `hooked_attention`.

    Returns:
        The config that each module had, and another copy of it.
    """
    had, copies, kept = configs_of(model), dict[int, Any](), dict[int, Any]()
    before = {module: (config, deepcopy(config, kept)) for module, config in had.items()}
    for module, config in had.items():
        module.config = copied = deepcopy(config, copies)
        copied._attn_implementation_internal = HOOKED + kernel_name(config)
    return before


def carry_changes(changed: Any, before: Any, config: Any) -> None:
    """Makes the changes in `config` that a module's own copy has had since it was equal to `before`."""
    for name, value in vars(changed).items():
        if name == "_attn_implementation_internal":
            is_set = not str(value).startswith(HOOKED)
            if is_set and kernel_name(changed) != kernel_name(before):
                setattr(config, name, value)
            continue
        old, new = vars(before).get(name), vars(config).get(name)
        if _is_config(value) and _is_config(old) and _is_config(new):
            carry_changes(value, old, new)
        elif name not in vars(before) or not same(value, old):
            setattr(config, name, value)


def same(one: Any, other: Any) -> bool:
    """Whether two values of configs are equal; configs inside them count by what they hold."""
    return repr(one) == repr(other)


def kernel_name(config: Any) -> str:
    """The name of the kernel that a config asks for."""
    return str(config._attn_implementation or "sdpa").removeprefix(HOOKED)


def base_of(model: Any) -> Any:
    """The model inside an adapter's wrapper, which hands its arguments on to it, or calls it alone, as in generation."""
    return getattr(model, "get_base_model", lambda: model)()


def text_config(model: Any) -> Any:
    """The part of a model's config that is about its text blocks; the whole one, or the model, where there is no other."""
    config = getattr(model, "config", model)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation")


def kernel_of(module: nn.Module) -> Kernel:
    """The function that the module would call if the model were not attached."""
    name, eager = kernel_name(module.config), None
    for kind in type(module).__mro__:
        eager = eager or getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
    kernels = library("transformers").AttentionInterface()
    return eager if name == "eager" and eager else kernels["sdpa" if name == "eager" else name]


LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attached model, under our names.

    Attributes:
        vocab_size: the number of logits.
        n_ctx: the longest text; a model that does not say reads any.
        n_layers, n_heads, d_model, logit_cap: as in `models.TransformerConfig`.
    """

    vocab_size: int
    n_ctx: int
    n_layers: int
    n_heads: int
    d_model: int
    logit_cap: float


def sizes_of(model: Any, vocab_size: int, n_layers: int, d_model: int, logit_cap: float) -> Sizes:
    """The sizes of a model, some of which its config says."""
    config = text_config(model)
    n_ctx = next((n for name in LENGTHS if (n := getattr(config, name, None))), sys.maxsize)
    n_heads = getattr(config, "num_attention_heads", 0)
    return Sizes(vocab_size, n_ctx, n_layers, n_heads, d_model, logit_cap)
