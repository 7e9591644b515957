"""Configs of an attached model: its own copies, so that models that share them are not affected."""

import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from models.files import library

Kernel = Callable[..., tuple[Tensor, Any]]
"""An attention function of `transformers`. It returns z, [batch, query, head, d_head], and weights or None."""

EAGER, FUSED = "hooked_eager", "hooked_sdpa"


def own_configs(model: Any) -> dict[nn.Module, Any]:
    """Gives every module of the model a copy of its config that asks for `hooked_attention`.

    Returns:
        The config that each module had.
    """
    had = {m: vars(m)["config"] for m in model.modules() if _is_config(vars(m).get("config"))}
    copies: dict[int, Any] = {}
    for module, config in had.items():
        module.config = own = deepcopy(config, copies)
        eager = config._attn_implementation == "eager"
        own._attn_implementation_internal = EAGER if eager else FUSED
    return had


def text_config(model: Any) -> Any:
    """The part of a model's config that is about its text blocks; the whole one where there is no other."""
    return model.config.get_text_config()


def _is_config(value: Any) -> bool:
    return hasattr(value, "_attn_implementation")


def kernel_of(module: nn.Module) -> Kernel:
    """What the module would call if the model were not attached."""
    config: Any = module.config
    if config._attn_implementation == EAGER:
        for kind in type(module).__mro__:
            own = getattr(sys.modules[kind.__module__], "eager_attention_forward", None)
            if own is not None:
                return own
    return library("transformers").AttentionInterface()["sdpa"]
