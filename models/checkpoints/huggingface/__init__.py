"""Load Hugging Face checkpoints from a directory of `save_pretrained`, or from memory.

This file contains the loader. Read `family` next, the form of the tables, and then `families`, the
table of each kind of model; `quantized` reads weights in fp8.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hooks.base import explains_calls, hooks_of, require_choice, require_module, storage, whole
from hooks.shared import is_foreign
from models.adapters import AdaptedMap, adapted_maps, weights_without_adapters
from models.checkpoints.assemble import DTYPES, Reader, TensorSource, assemble, end_tokens
from models.checkpoints.huggingface.families import FAMILIES
from models.checkpoints.huggingface.family import Attributes, Family
from models.checkpoints.huggingface.quantized import (
    KEY,
    dequantized,
    require_fp8,
    with_plain_weights,
)
from models.checkpoints.readers import reader_of
from models.config import TransformerConfig
from models.files import read_object, without
from models.transformer import Transformer


def translated(described: Mapping[str, Any], where: str) -> tuple[Family, TransformerConfig]:
    """Return the family and the config that a Hugging Face config describes.

    Args:
        described: the content of config.json.
        where: the name of the file, for errors.

    Raises:
        ValueError: if the family or an attribute is unknown or not supported; the error names it.
    """
    kind = str(described.get("model_type"))
    require_choice(f"{where}: model_type", kind, FAMILIES)
    attributes = Attributes(described)
    family = FAMILIES[kind]
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
    """Load the model in a directory that Hugging Face's `save_pretrained` wrote.

    The tokens that end a text are read from generation_config.json if the directory has one.

    Args:
        directory: the directory.
        described: the content of its config.json.
        dtype: the dtype of all parameters. Default: the dtype of the file. If weights are in fp8,
            the dtype in config.json.
        device: the device of the parameters. Default: the CPU.

    Raises:
        FileNotFoundError: if the directory has no weights, or if a shard is missing.
        ValueError: if a file is damaged, if weights are quantized in another form than fp8, or if
            the config is not supported or does not match the weights.
    """
    path = directory / "generation_config.json"
    generation = read_object(path) if path.is_file() else {}
    described = _ended(described, generation.get("eos_token_id"))
    quantization = described.get(KEY)
    if quantization:
        require_fp8(quantization, directory)
    plain = {key: value for key, value in described.items() if key != KEY}
    family, config = translated(plain, str(directory / "config.json"))
    reader, path = reader_of(directory)
    if quantization:
        reader = dequantized(reader, quantization, dtype or _dtype_of(described))
    table = family.table(config, reader.keys)
    return assemble(
        config,
        table,
        reader=reader,
        where=str(path),
        ignored=family.is_ignored,
        dtype=dtype,
        device=device,
    )


@explains_calls
def from_hf(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
    tokenizer: Any = None,
) -> Transformer:
    """Return a copy of a model of `transformers` as a plain `Transformer`, in evaluation mode.

    LoRA adapters of `peft` that act are merged into the weights of the copy.

    Args:
        model: a causal language model of a family in `FAMILIES`. The copy shares no memory with it.
        dtype: the dtype of all parameters. Default: the dtype of the model.
        device: the device of the parameters. Default: the device of the model's first parameter.
        ignore: keys of the config to treat as absent; see `load`.
        tokenizer: the tokenizer of the model, for example a tokenizer of transformers.

    Returns:
        The copy. Its logits [batch, pos, vocab] equal the logits of `model`, up to rounding.

    Raises:
        TypeError: if the model has no config of transformers, or if `tokenizer` is not a tokenizer.
        ValueError: if a module has a forward of its own or a hook, if the model has an adapter of
            another kind than LoRA, if weights are quantized, if the config is not supported, or if
            the weights do not match the config.
        UnknownNameError: if a key to ignore is not in the config.

    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> sizes = GPT2Config(vocab_size=7, n_positions=9, n_embd=4, n_layer=1, n_head=2)
    >>> model = GPT2LMHeadModel(sizes).eval()
    >>> tokens = torch.tensor([[3, 1, 4]])
    >>> torch.allclose(from_hf(model)(tokens), model(tokens).logits, atol=1e-6)
    True
    """
    copied = from_memory(model, keep=False, dtype=dtype, device=device, ignore=ignore)
    copied.tokenizer = tokenizer
    return copied


def _check_forward(model: nn.Module) -> None:
    """Raise an error for a model whose output does not follow from its weights and its config.

    Raises:
        ValueError: naming the module or the weight.
    """
    for name, module in model.named_modules():
        where = type(module).forward.__module__.partition(".")[0]
        # `adapted_maps` has checked the modules of `peft`.
        if where not in ("transformers", "torch", "hooks", "models", "peft"):
            raise ValueError(
                f"every module must have a forward of transformers; got {name or 'a model'} with a "
                f"forward of {where!r}"
            )
        if any(map(is_foreign, hooks_of(module))):
            raise ValueError(
                "the model must have no hooks, because the copy has none; got a hook on "
                f"{name or 'the model'}"
            )
    for name, weight in model.named_parameters():
        if weight.is_meta and hasattr(model, "_hf_hook"):
            raise ValueError(
                f"weights must be in memory; {name} is offloaded until it is needed (load the "
                "model without offload, for example with device_map='cpu', or use an analysis that "
                "only runs the model, such as activation_patching or attribution_patching)"
            )
        kind = type(weight)
        if kind.__module__.partition(".")[0] not in ("torch", "transformers"):
            raise ValueError(
                f"weights must be plain tensors of PyTorch; got {kind.__name__} of "
                f"{kind.__module__} as {name} (quantized weights cannot be read: load the model "
                "without quantization)"
            )


def from_memory(
    model: nn.Module,
    keep: bool,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
) -> Transformer:
    """Return a model of `transformers` in memory as a plain `Transformer`.

    `from_hf` calls this with copied weights. A view shares memory with the model (`keep`).

    Args:
        model: the model.
        keep: whether weights share memory with the model where that is possible: where the plain
            model has the same layout, dtype and device. If the model has adapters (such as LoRA),
            the attention and the MLP of the result then have an attribute `adapter`: their output
            map with its adapter.
        dtype: the dtype of all parameters. Default: the dtype of the model.
        device: the device of the parameters. Default: the device of the model's first parameter.
        ignore: keys of the config to treat as absent.
    """
    kind = type(model).__name__
    require_module(model)
    # Check the whole model, because prompts that an adapter adds are outside the model inside.
    adapted_maps(model)
    model = getattr(model, "get_base_model", lambda: model)()
    adapted = adapted_maps(model)
    if not callable(to_dict := getattr(getattr(model, "config", None), "to_dict", None)):
        raise TypeError(f"model must be a model of transformers, with its config; got a {kind}")
    described = without(to_dict(), ignore, f"{kind}.config")
    described = with_plain_weights(described, model.parameters())
    _check_forward(model)
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    family, config = translated(_ended(described, ends), f"{kind}.config")
    state = weights_without_adapters(model, adapted)

    def read(key: str) -> Tensor:
        name, _, part = key.rpartition(".")
        if name in adapted:
            return adapted[name].merged(part)
        return whole(state[key])

    reader = Reader(state.keys(), read, keep)
    table = family.table(config, state.keys())
    device = next(model.parameters()).device if device is None else device
    transformer = assemble(
        config,
        table,
        reader=reader,
        where=kind,
        ignored=family.is_ignored,
        dtype=dtype,
        device=device,
    )
    if keep:
        _add_adapters(transformer, table, adapted)
    return transformer


def _add_adapters(
    transformer: Transformer, table: Mapping[str, TensorSource], adapted: Mapping[str, AdaptedMap]
) -> None:
    """Give each sublayer of a view the adapted map of its output, `adapter`, if there is one.

    Args:
        transformer: the plain model, whose weights contain the adapters.
        table: the source of each parameter.
        adapted: the maps with adapters, by name.
    """
    for layer, block in enumerate(transformer.blocks):
        for part in ("attn", "mlp"):
            source = table.get(f"blocks.{layer}.{part}.output.weight")
            name = source.keys[0].removesuffix(".weight") if source else ""
            if name in adapted and adapted[name].names:
                getattr(block, part).adapter = adapted[name]


def _dtype_of(described: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of the weights according to a config; None if the config has no dtype."""
    name = described.get("dtype") or described.get("torch_dtype")
    dtype = getattr(torch, str(name), None)
    return dtype if dtype in DTYPES else None


def _ended(described: Mapping[str, Any], tokens: Any) -> Mapping[str, Any]:
    """Return the config with the tokens that end a generation, if any are given."""
    return described if tokens is None else {**described, "eos_token_id": tokens}
