"""Families of Hugging Face checkpoints, by the `model_type` of their config.json."""

import difflib
from collections.abc import Mapping
from typing import Any

from models.checkpoints.families import gpt, llama
from models.checkpoints.families.family import Attributes, Family
from models.config import TransformerConfig

__all__ = ["FAMILIES", "Family", "translated"]

_CAUSAL_BUFFERS = (r"h\.\d+\.attn\.(bias|masked_bias)",)
_ROTARY_BUFFERS = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)
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
    kind = str(described.get("model_type"))
    if kind not in FAMILIES:
        close = difflib.get_close_matches(kind, FAMILIES, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        known = ", ".join(FAMILIES)
        raise ValueError(f"{where}: model_type must be one of {known}; got {kind!r}{hint}")
    attributes = Attributes(described)
    try:
        config = FAMILIES[kind].config(attributes)
        attributes.finish()
    except KeyError as error:
        raise ValueError(f"{where}: {error} must be given") from None
    except (TypeError, ValueError) as error:  # numbers that are text
        raise ValueError(f"{where}: {error}") from None
    return FAMILIES[kind], config
