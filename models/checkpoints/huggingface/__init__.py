"""Hugging Face checkpoints and their families, from a directory of `save_pretrained` or from memory."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import hooks_of, require_choice, require_module, storage
from hooks.shared import is_foreign
from models.checkpoints.assemble import Reader, assemble, end_tokens
from models.checkpoints.huggingface.families import FAMILIES
from models.checkpoints.huggingface.family import Attributes, Family
from models.checkpoints.readers import reader_of
from models.config import TransformerConfig
from models.files import read_object, without
from models.transformer import Transformer


def translated(described: Mapping[str, Any], where: str) -> tuple[Family, TransformerConfig]:
    """The family and the config that a Hugging Face config describes.

    Args:
        described: the content of config.json.
        where: the file, for errors.

    Raises:
        ValueError: if the family or an attribute is unknown or cannot be expressed; it names it.
    """
    kind = str(described.get("model_type"))
    require_choice(f"{where}: model_type", kind, FAMILIES)
    attributes, family = Attributes(described), FAMILIES[kind]
    with storage.one_error(where):
        config = family.config(attributes)
        attributes.finish()
        ends = end_tokens(
            attributes.take("eos_token_id", family.facts.get("eos")), config.vocab_size
        )
        return family, config.replace(eos_token_ids=ends)


def load_huggingface(
    directory: Path,
    described: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Loads the model in a directory; `described` is its config.json.

    The tokens that end a text are read from generation_config.json first.

    Raises:
        FileNotFoundError: if there are no weights, or a shard is missing.
        ValueError: if a file is damaged, or the config cannot be expressed or does not match the weights.
    """
    path = directory / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    described = _ended(described, generation.get("eos_token_id"))
    family, config = translated(described, str(directory / "config.json"))
    reader, path = reader_of(directory)
    table = family.table(config, reader.keys)
    return assemble(config, table, reader, str(path), family.is_ignored, dtype, device)


def from_hf(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
    tokenizer: Any = None,
) -> Transformer:
    """Copies a `transformers` model in memory to a `Transformer` in evaluation mode.

    Args:
        model: a causal language model of a family in `FAMILIES`. It shares no memory with the copy.
        dtype: of all parameters; None for the model's own.
        device: where the parameters go; None for the device of the model's first parameter.
        ignore: see `load`.
        tokenizer: the model's, such as one of transformers.

    Raises:
        TypeError: if the model has no config of transformers, or the tokenizer is none.
        ValueError: if a part has a forward of its own, or a hook.
        UnknownNameError: if a key to ignore is not in its config.
        ValueError: if its config cannot be expressed, or its weights do not match the config.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> tokens = torch.tensor([[3, 1, 4]])
    >>> torch.allclose(from_hf(model)(tokens), model(tokens).logits, atol=1e-6)
    True
    """
    copied = from_memory(model, False, dtype, device, ignore)
    copied.tokenizer = tokenizer
    return copied


def _check_forward(model: nn.Module) -> None:
    """Refuses a model that computes something else than its weights and config say."""
    require_module(model)
    for name, module in model.named_modules():
        where = type(module).forward.__module__.partition(".")[0]
        if where not in ("transformers", "torch", "hooks", "models"):
            raise ValueError(
                f"every part must have a forward of transformers; got {name or 'a model'} with one of {where!r} (adapters are merged first)"
            )
        if any(map(is_foreign, hooks_of(module))):
            raise ValueError(
                f"the model must have no hooks, which a copy has not; got one on {name or 'the model'}"
            )
    for name, weight in model.named_parameters():
        if weight.is_meta and hasattr(model, "_hf_hook"):
            raise ValueError(
                f"weights must be in memory; {name} is elsewhere until it is needed, as offloading keeps it"
            )
        kind = type(weight)
        if kind.__module__.partition(".")[0] not in ("torch", "transformers"):
            raise ValueError(
                f"weights must be numbers of PyTorch's own; got {kind.__name__} of {kind.__module__} as {name} (quantized "
                "weights cannot be read: load the model without quantization)"
            )


def from_memory(
    model: nn.Module,
    keep: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
) -> Transformer:
    """Like `from_hf`. With `keep`, weights that need no new layout stay in the model's own memory."""
    what = type(model).__name__
    _check_forward(model)
    if not callable(to_dict := getattr(getattr(model, "config", None), "to_dict", None)):
        raise TypeError(f"from_hf needs a model of transformers, with its config; got a {what}")
    described = without(to_dict(), ignore, f"{what}.config")
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    family, config = translated(_ended(described, ends), f"{what}.config")
    state = model.state_dict()

    def read(key: str) -> Tensor:
        weight: Any = state[key]  # one that is split over processes is joined
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight

    reader = Reader(state.keys(), read, keep)
    table = family.table(config, state.keys())
    device = next(model.parameters()).device if device is None else device
    return assemble(config, table, reader, what, family.is_ignored, dtype, device)


def _ended(described: Mapping[str, Any], tokens: Any) -> Mapping[str, Any]:
    """A config with the tokens by which generation ends, if there are any."""
    return described if tokens is None else {**described, "eos_token_id": tokens}
