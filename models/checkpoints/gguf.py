"""Load models from GGUF files, the format of llama.cpp. `gguf_config` lists the architectures."""

import os
from collections.abc import Collection, Mapping
from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from hooks.base import storage
from models.checkpoints.assemble import Reader, TensorSource, assemble, concatenated
from models.checkpoints.gguf_config import (
    ARCHITECTURES,
    BEYOND,
    BLOCK_TENSORS,
    QKV_APART,
    READ_BY_TRANSFORMERS,
    TOP_TENSORS,
    Architecture,
    gguf_config,
)
from models.checkpoints.gguf_file import GGUFFile
from models.checkpoints.gguf_tokenizer import read_tokenizer
from models.config import TransformerConfig
from models.text.tokenizer import Tokenizer
from models.transformer import Transformer


def load_gguf(
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Collection[str] = (),
) -> Transformer:
    """Load the model in a GGUF file, in evaluation mode.

    Tensors are dequantized one at a time, so loading needs little more memory than the model.

    The format leaves some facts open. They are as in llama.cpp: the scale of dot products in Gemma,
    the windows of Gemma 3 in five of six layers and their rotary base 10,000, the same base in
    GPT-NeoX, Phi 2, StableLM and Falcon, and no windows for Mistral, Qwen 2 and StarCoder 2. The
    activation of GPT-NeoX is the exact GELU, as in Pythia. Two factors have no field in our config
    and are multiplied into the weights: the factor of the outputs of Granite's sublayers into their
    output maps, and the factor of the logits (Granite, Command R) into the gain of the final norm.

    Args:
        path: a single file of one of `ARCHITECTURES`, with tensors of any type that the package
            gguf can dequantize.
        dtype: the dtype of all weights. Default: float32, for every type in the file.
        device: the device of the weights. Default: the CPU.
        ignore: keys of the metadata to treat as absent.

    Raises:
        UnknownNameError: if a key to ignore is not in the file.
        ValueError: if the file is damaged, describes a model that a `Transformer` cannot express,
            or has tensors that do not match its metadata. The error names the file.
    """
    with storage.one_error(path):
        file = GGUFFile(path, ignore)
        name = _architecture(file)
    try:
        with storage.one_error(path):
            config, factors = gguf_config(file, name)
    except ValueError as error:
        raise ValueError(f"{error}; {_alternative(path, file, name)}") from None
    ignored = set()
    if config.positions == "rotary":
        # This tensor contains factors of rotary frequencies, which `gguf_config` has read.
        ignored.add("rope_freqs.weight")
    if config.tied_unembed:
        # If the file has this tensor, it is a copy of the embedding.
        ignored.add("output.weight")
    table = _gguf_table(config, file.shapes, architecture=ARCHITECTURES[name], factors=factors)
    reader = Reader(file.shapes.keys(), file.read, keep=True)
    return assemble(
        config,
        table,
        reader=reader,
        where=str(path),
        ignored=ignored.__contains__,
        dtype=dtype,
        device=device,
    )


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer in a GGUF file; see `gguf_tokenizer` for the kinds.

    Raises:
        ImportError: if the library `tokenizers` is missing.
        ValueError: if the file is damaged or its tokenizer is of an unknown kind; the error names
            the file.
    """
    with storage.one_error(path):
        return read_tokenizer(GGUFFile(path))


def _architecture(file: GGUFFile) -> str:
    """Return the architecture of a file that contains a whole model.

    Raises:
        ValueError: if the file contains something else.
    """
    general = file.metadata("general.")
    kind = general.get("type", "model")
    n_files = file.metadata("split.").get("count", 1)
    if kind != "model" or n_files > 1:
        raise ValueError(
            f"the file must contain a whole model; got 1 of {n_files} files of a {kind}"
        )
    return str(general.get("architecture"))


def _alternative(path: str | os.PathLike[str], file: GGUFFile, name: str) -> str:
    """Return a hint for an unsupported model.

    The hint names the unsupported part, if it is known, and the call that loads the model.
    """
    keys = file.metadata(f"{name}.")
    parts = [part for part, names in BEYOND.items() if name in names]
    parts += ["a mixture of experts"] if keys.get("expert_count") else []
    parts += ["state spaces"] if any(key.startswith("ssm.") for key in keys) else []
    scaled = keys.get("rope.scaling.factor", 1) != 1 or "rope_freqs.weight" in file.shapes
    folder, which = os.path.split(os.fspath(path))
    arguments = f"{folder or '.'!r}, gguf_file={which!r}, dtype='float32'"
    folder_of_original = "'the folder that the file was made from'"
    source = arguments if name in READ_BY_TRANSFORMERS and not scaled else folder_of_original
    has = f"it has {' and '.join(parts)}; " if parts else ""
    call = f"models.attach(transformers.AutoModelForCausalLM.from_pretrained({source}))"
    return f"{has}another road: {call}"


def _gguf_table(
    config: TransformerConfig,
    keys: Collection[str],
    architecture: Architecture,
    factors: Mapping[str, float],
) -> dict[str, TensorSource]:
    """Return the source of each parameter in a file.

    Args:
        config: the config of the model.
        keys: the names of the tensors in the file.
        architecture: the architecture of the file.
        factors: the factors that multiply the weights of some modules, by the name of the module.
    """
    kinds = {".".join(key.split(".")[2:3]) for key in keys if key.startswith("blk.")}
    n_names = None if config.parallel else 1
    blocks = dict[str, str]()
    for ours, names in {**BLOCK_TENSORS, **architecture.tensors}.items():
        present = [name for name in names[:n_names] if name in kinds]
        blocks[ours] = present[0] if present else names[0]
    converts = {ours: partial(torch.mul, other=factor) for ours, factor in factors.items()}
    if architecture.permuted:
        n_rotated = (config.n_heads + config.n_kv_heads) * config.d_head
        converts["attn.qkv"] = partial(_halves_together, n_rotated, config.d_head)
    if blocks["mlp.gate"] == blocks["mlp.input"]:
        converts |= {"mlp.gate": partial(_half, 0), "mlp.input": partial(_half, 1)}
    modules = [(ours, theirs, ours) for ours, theirs in TOP_TENSORS.items()]
    for layer in range(config.n_layers):
        modules += [
            (f"blocks.{layer}.{ours}", f"blk.{layer}.{theirs}", ours)
            for ours, theirs in blocks.items()
        ]
    table = {}
    for module, theirs, ours in modules:
        for leaf in ("weight", "bias"):
            whole = f"{theirs}.{leaf}"
            apart = tuple(whole.replace("attn_qkv", part) for part in QKV_APART)
            is_apart = ours == "attn.qkv" and not set(apart).isdisjoint(keys)
            tensors = apart if is_apart else (whole,)
            table[f"{module}.{leaf}"] = TensorSource(tensors, converts.get(ours, concatenated))
    return table


def _half(which: int, gate_and_input: Tensor) -> Tensor:
    """Return the first or the second half of the rows of a tensor."""
    return gate_and_input.chunk(2)[which]


def _halves_together(n_rotated: int, d_head: int, *qkv: Tensor) -> Tensor:
    """Concatenate q, k and v, with q and k in our order for rotary embeddings.

    llama.cpp rotates the neighbours 2i and 2i + 1, and its files store the rows of each head of q
    and k permuted for this. We rotate i with i + d_head/2.
    """
    rows = torch.cat(qkv)
    reordered = rearrange(
        rows[:n_rotated], "(head pair half) ... -> (head half pair) ...", half=2, pair=d_head // 2
    )
    return torch.cat([reordered, rows[n_rotated:]])
