"""Hugging Face checkpoints, in a directory of `save_pretrained` or in memory, and their families."""

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


def load_huggingface(
    directory: Path,
    described: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """The model in a directory; `described` is its config.json.

    Raises:
        FileNotFoundError: if there are no weights, or a shard is not there.
        ValueError: if a file is damaged, the config cannot be expressed, or the weights are not its own.
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
    """A copy of a `transformers` model in memory, in eval mode; no weight is shared.

    Args:
        model: a causal language model of a family in `FAMILIES`.
        dtype: of all parameters; None for the model's own.
        device: where the parameters go; None for where the model's first is.

    Raises:
        TypeError: if the model has no config of transformers.
        ValueError: if its config cannot be expressed, or its weights are not the config's.
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
