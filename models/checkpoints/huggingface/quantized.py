"""Quantized checkpoints: weights in fp8 are read; for other forms, an error says how to load them.

1. `quantization_config` in config.json names the form and its settings.
2. In fp8, a weight of 8-bit floats has a second tensor, `weight_scale_inv`. It contains one scale
   for each block of rows and columns, or one scale for the whole weight.
3. The weight of the model is the tensor times its scales (`dequantized`).
4. Libraries store the other forms as packed integers. `transformers` loads these forms with the
   library that wrote them (`require_fp8`, `with_plain_weights`).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoints.assemble import Reader

KEY = "quantization_config"
# `activation_scale` belongs to kernels that also round activations.
_SCALES = ("weight_scale_inv", "activation_scale")
# The forms that `transformers` dequantizes while it loads, by the class of their settings.
_DEQUANTIZED_BY = {
    "fp8": "FineGrainedFP8Config",
    "mxfp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
    "compressed-tensors": "CompressedTensorsConfig",
}
# The packages that `transformers` needs to load a form.
_PACKAGES = {
    "awq": "gptqmodel",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gptq": "gptqmodel and optimum",
    "quanto": "optimum-quanto",
    "torchao": "torchao",
}


def require_fp8(quantization: Mapping[str, Any], directory: Path) -> None:
    """Check that a quantized checkpoint has the form fp8.

    Args:
        quantization: the `quantization_config` of config.json.
        directory: the directory of the checkpoint, for the error.

    Raises:
        ValueError: for another form; the error gives the call that loads it.
    """
    form = _form(quantization)
    if form == "fp8":
        return
    arguments = repr(str(directory))
    if form in _DEQUANTIZED_BY:
        arguments += f", {KEY}={_DEQUANTIZED_BY[form]}(dequantize=True)"
    package = f", with the package {_PACKAGES[form]}" if form in _PACKAGES else ""
    raise ValueError(
        f"{directory}: weights must be plain numbers or fp8; got {form} (use "
        f"attach(AutoModelForCausalLM.from_pretrained({arguments})){package})"
    )


def with_plain_weights(described: Mapping[str, Any], weights: Iterable[Tensor]) -> dict[str, Any]:
    """Return the config of a model in memory without the form of its file, if weights are plain.

    `transformers` unpacks the weights of a GGUF file, but the config still names the form.

    Args:
        described: the content of the config.
        weights: the parameters of the model.

    Raises:
        ValueError: if the weights are quantized; the error says how to load them as plain weights.
    """
    plain = {name: value for name, value in described.items() if name != KEY}
    if not described.get(KEY):
        return plain
    form = _form(described[KEY])
    if form == "gguf" and all(weight.is_floating_point() for weight in weights):
        return plain
    way = "load it without quantization"
    if form in _DEQUANTIZED_BY:
        way = f"load it with {KEY}={_DEQUANTIZED_BY[form]}(dequantize=True)"
    elif form == "bitsandbytes":
        # On a CPU, a run reorders weights of four bits, and they are then dequantized wrongly.
        way = "load it again, and call model.dequantize() before the first run"
    raise ValueError(
        f"weights must not be quantized if they are read; got {form} ({way}, or use an analysis "
        "that only runs the model, such as activation_patching)"
    )


def dequantized(
    reader: Reader, quantization: Mapping[str, Any], dtype: torch.dtype | None
) -> Reader:
    """Return a reader that returns the weights of fp8 times their scales.

    Args:
        reader: the tensors of the file.
        quantization: the `quantization_config` of config.json.
        dtype: the dtype of the products. Default: float32.
    """

    def read(key: str) -> Tensor:
        tensor, name = reader.read(key), f"{key}_scale_inv"
        if name not in reader.keys:
            return tensor
        sizes = quantization.get("weight_block_size") or tensor.shape
        return _product(tensor, reader.read(name), sizes, name).to(dtype or torch.float32)

    keys = frozenset(key for key in reader.keys if not key.endswith(_SCALES))
    return Reader(keys, read, reader.keep)


def _product(tensor: Tensor, scales: Tensor, sizes: Sequence[int], name: str) -> Tensor:
    """Return a tensor times the scales of its blocks, in float32.

    Args:
        tensor: 8-bit floats [rows, columns].
        scales: one scale for each block [block of rows, block of columns].
        sizes: the numbers of rows and columns of a block.
        name: the name of the scales, for the error.

    Raises:
        ValueError: if the scales do not fit, or are not floats.
    """
    blocks = [-(-length // size) for length, size in zip(tensor.shape, sizes, strict=True)]
    grid = scales.reshape(1, 1) if scales.numel() == 1 else scales
    are_floats = tensor.is_floating_point() and scales.is_floating_point()
    if not are_floats or [*grid.shape] != blocks:
        raise ValueError(
            f"{name} must be floats {blocks} for a weight of floats {[*tensor.shape]} in blocks "
            f"of {[*sizes]}; got {scales.dtype} {[*scales.shape]} for a weight of {tensor.dtype}"
        )
    for axis, size in enumerate(sizes):
        grid = grid.repeat_interleave(size, axis).narrow(axis, 0, tensor.shape[axis])
    return tensor.float() * grid.float()


def _form(quantization: Mapping[str, Any]) -> str:
    """Return the name of a form, for example `fp8`. Old configs of bitsandbytes do not name it."""
    bits = ("load_in_8bit", "load_in_4bit")
    unnamed = "bitsandbytes" if any(map(quantization.get, bits)) else "an unknown form"
    form = quantization.get("quant_method") or unnamed
    return str(getattr(form, "value", form))
