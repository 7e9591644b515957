"""Hugging Face checkpoints and their families, from a directory of `save_pretrained` or from memory."""

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoints.assemble import assemble
from models.checkpoints.huggingface import gpt, llama
from models.checkpoints.huggingface.family import Attributes, Family
from models.checkpoints.readers import reader_of
from models.config import TransformerConfig
from models.transformer import Transformer

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
        ValueError: if the family or an attribute is unknown or cannot be expressed; it names it.
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
    except (TypeError, ValueError, OverflowError) as error:  # numbers that are text
        raise ValueError(f"{where}: {error}") from None
    return FAMILIES[kind], config


def load_huggingface(
    directory: Path,
    described: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Loads the model in a directory; `described` is its config.json.

    Raises:
        FileNotFoundError: if there are no weights, or a shard is missing.
        ValueError: if a file is damaged, or the config cannot be expressed or does not match the weights.
    """
    family, config = translated(described, str(directory / "config.json"))
    reader, path = reader_of(directory)
    table = family.table(config, reader.keys())
    return assemble(config, table, reader, str(path), family.is_ignored, dtype, device)


def from_hf(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Copies a `transformers` model in memory to a `Transformer` in evaluation mode.

    Args:
        model: a causal language model of a family in `FAMILIES`. It shares no memory with the copy.
        dtype: of all parameters; None for the model's own.
        device: where the parameters go; None for the device of the model's first parameter.

    Raises:
        TypeError: if the model has no config of transformers.
        ValueError: if its config cannot be expressed, or its weights do not match the config.
    """
    what = type(model).__name__
    if not callable(to_dict := getattr(getattr(model, "config", None), "to_dict", None)):
        raise TypeError(f"from_hf needs a model of transformers, with its config; got a {what}")
    family, config = translated(to_dict(), f"{what}.config")
    reader = _InUse(model.state_dict())
    table = family.table(config, reader.keys())
    device = next(model.parameters()).device if device is None else device
    return assemble(config, table, reader, what, family.is_ignored, dtype, device)


class _InUse:
    """The tensors of a state dict that is in use."""

    keep = False

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def keys(self) -> Collection[str]:
        return self._state.keys()

    def read(self, key: str) -> Tensor:
        return self._state[key]
