"""Hugging Face checkpoints: a directory as `save_pretrained` writes it, or a model in memory."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.checkpoints.assemble import assemble
from models.checkpoints.families import translated
from models.checkpoints.readers import reader_of
from models.transformer import Transformer


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
        model: a causal language model of a family in `families.FAMILIES`.
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
