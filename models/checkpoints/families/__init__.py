"""Families of Hugging Face checkpoints, by the `model_type` of their config.json."""

import difflib
from collections.abc import Mapping
from typing import Any

from models.checkpoints.attributes import Attributes
from models.checkpoints.families import gpt, llama
from models.checkpoints.families.family import Family
from models.config import TransformerConfig

__all__ = ["FAMILIES", "Family", "translated"]

_CAUSAL_BUFFERS = (r"h\.\d+\.attn\.(bias|masked_bias)",)
_ROTARY_BUFFERS = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
# A damaged file's.
_TOO_MANY_LAYERS = 2**16
_NEOX_BUFFERS = (r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",)

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(gpt.gpt2_config, gpt.gpt2_rows, "transformer.", ignored=_CAUSAL_BUFFERS),
    "gpt_bigcode": Family(
        gpt.bigcode_config, gpt.bigcode_rows, "transformer.", ignored=_CAUSAL_BUFFERS
    ),
    "gpt_neox": Family(
        gpt.neox_config,
        gpt.neox_rows,
        "gpt_neox.",
        renamed={"embed_out.weight": "lm_head.weight"},
        ignored=_NEOX_BUFFERS,
    ),
    "llama": Family(llama.llama_config, llama.llama_rows, "model.", ignored=_ROTARY_BUFFERS),
    "mistral": Family(llama.mistral_config, llama.llama_rows, "model.", ignored=_ROTARY_BUFFERS),
    "qwen2": Family(llama.qwen2_config, llama.llama_rows, "model.", ignored=_ROTARY_BUFFERS),
    "qwen3": Family(llama.qwen3_config, llama.qwen3_rows, "model."),
    "olmo2": Family(llama.olmo2_config, llama.olmo2_rows, "model."),
    "gemma2": Family(llama.gemma2_config, llama.gemma2_rows, "model."),
}


def translated(described: Mapping[str, Any], where: str) -> tuple[Family, TransformerConfig]:
    """The family and the config that a Hugging Face config describes.

    Args:
        described: the content of config.json.
        where: the file, for errors.

    Raises:
        ValueError: naming the family or the attribute that is unknown or cannot be expressed.
    """
    if "model_type" not in described:
        raise ValueError(f"{where}: model_type is missing; it is one of {', '.join(FAMILIES)}")
    kind = described["model_type"]
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        close = difflib.get_close_matches(str(kind), FAMILIES, n=2)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"{where}: model_type is one of {', '.join(FAMILIES)}, not {kind!r}{hint}")
    for name in ("n_layer", "num_hidden_layers"):
        # Before lists of that length are made; what the file's keys say of it comes later.
        n_layers = described.get(name, 0)
        if type(n_layers) is not int or n_layers >= _TOO_MANY_LAYERS:
            rule = f"a whole number below {_TOO_MANY_LAYERS}"
            raise ValueError(f"{where}: {name} is {rule}, not {n_layers!r}")
    attributes = Attributes(described)
    try:
        config = family.config(attributes)
        attributes.finish()
    except (TypeError, ValueError, OverflowError) as error:  # numbers that are text, or huge
        raise ValueError(f"{where}: {error}") from None
    return family, config
