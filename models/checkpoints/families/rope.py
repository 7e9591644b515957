"""Rotary positions as config.json spells them, in its old and its new form."""

import math
from typing import Any

from models.checkpoints.attributes import Attributes
from models.config import RotaryScaling


def rotary(
    a: Attributes, n_ctx: int, spelled: dict[str, str] | None = None, fraction: float = 1.0
) -> dict[str, Any]:
    """Our rotary fields, from `rope_parameters`, or from `rope_scaling` and attributes beside it.

    The context is among them, as scaling may stretch it.

    Args:
        a: the attributes.
        n_ctx: `max_position_embeddings`, which in some files is the context before it is stretched.
        spelled: what the family calls `rope_theta` and `partial_rotary_factor`, if something else.
        fraction: the share of a head that is rotated where the file does not say it.

    Raises:
        ValueError: if there is a form that cannot be expressed, or two places disagree.
    """
    if type(n_ctx) is not int:
        raise a.error("max_position_embeddings", n_ctx, "whole numbers")
    given: dict[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        stated = a.take(name, None) or {}
        if not isinstance(stated, dict) or any(isinstance(v, dict) for v in stated.values()):
            raise a.error(name, stated, "one set of numbers for all layers")
        for key, value in stated.items():
            _agree(a, given, "rope_type" if key == "type" else key, value)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        for key in {name, (spelled or {}).get(name, name)}:
            _agree(a, given, name, a.take(key, None))
    theta = given.pop("rope_theta", 10_000.0)
    fraction = given.pop("partial_rotary_factor", fraction)
    scaling = _scaling(a, given, n_ctx)
    return {
        "n_ctx": _stretched(a, n_ctx, scaling),
        "positions": "rotary",
        "rotary_theta": theta,
        "rotary_fraction": fraction,
        "rotary_scaling": scaling,
    }


def _stretched(a: Attributes, n_ctx: int, scaling: RotaryScaling | None) -> int:
    """The context that scaling gives; transformers itself has no limit."""
    length = a.take("max_sequence_length", None)
    if scaling and scaling.kind == "linear" and type(length) is int:  # Vicuna's 16k
        return max(n_ctx, length)
    if scaling and scaling.kind == "yarn":
        return max(n_ctx, int(scaling.factor * scaling.original_n_ctx))
    return n_ctx


def _agree(a: Attributes, given: dict[str, Any], name: str, value: Any) -> None:
    if type(value) is int and name != "original_max_position_embeddings":
        value = float(value)
    if value is not None and given.setdefault(name, value) != value:
        raise a.error(name, value, f"only one value, and {given[name]!r} is given as well")


def _scaling(a: Attributes, given: dict[str, Any], n_ctx: int) -> RotaryScaling | None:
    kind = given.pop("rope_type", "default")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": (),
    }
    if not isinstance(kind, str) or kind not in needed:
        raise a.error("rope_type", kind, ", ".join(needed))
    for name, value in given.items():
        if not isinstance(value, int | float):  # truncate and finetuned are bools, which are ints
            raise a.error(name, value, "numbers")
    missing = [name for name in needed[kind] if name not in given]
    if missing:
        raise a.error("rope_type", kind, f"{kind} with {', '.join(missing)}")
    original = given.pop("original_max_position_embeddings", n_ctx)
    # Whether the weights were trained so; transformers reads it nowhere.
    given.pop("finetuned", None)
    scaling = None
    if kind == "default" and given.get("factor") == 1:  # which divides nothing
        del given["factor"]
    if kind == "linear":
        scaling = RotaryScaling(kind="linear", factor=given.pop("factor"))
    elif kind == "llama3":
        factor, low, high = (given.pop(name) for name in needed[kind])
        scaling = RotaryScaling(
            kind="llama3", factor=factor, original_n_ctx=original, low=low, high=high
        )
    elif kind == "yarn":
        scaling = _yarn(a, given, n_ctx, original)
    if given:
        raise a.error("rope_parameters", given, f"nothing besides what {kind} needs")
    return scaling


def _yarn(a: Attributes, given: dict[str, Any], n_ctx: int, original: int) -> RotaryScaling:
    if given.pop("truncate", True) is not True:
        raise a.error("truncate", False, "True")
    given.pop("attn_factor", None)  # llama.cpp's; transformers reads attention_factor alone
    factor = given.pop("factor", n_ctx / original)
    above, below = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    length = given.pop("attention_factor", None)
    if length is None and above and below and factor > 1:  # DeepSeek's form
        length = (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
    if length == 0:  # which stands for the usual form in our config
        raise a.error("attention_factor", length, "numbers above 0")
    return RotaryScaling(
        kind="yarn",
        factor=factor,
        original_n_ctx=original,
        # 0 stands for the published values, there as here
        low=given.pop("beta_slow", 0.0),
        high=given.pop("beta_fast", 0.0),
        attention_factor=length or 0.0,
    )
