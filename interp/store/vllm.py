"""Read the hidden states that vLLM writes.

With `speculative_config={"method": "extract_hidden_states", ...}`, vLLM writes a safetensors file
for each request. It contains `token_ids` [pos] and `hidden_states` [pos, layer, d_model]. The
layers are in the order of `eagle_aux_hidden_state_layer_ids`, and the file does not name them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from hooks.base import storage
from interp.store.activations import Activations
from interp.store.imported import TextValues, imported
from interp.store.rows import HarvestConfig


def from_vllm(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    layers: Sequence[int],
    per_file: int = 64,
) -> Activations:
    """Return a store of hidden states that vLLM has written. Each request is a text.

    Like `harvest`, the same call can be repeated at any time. A repeated call writes only the files
    that are missing or damaged.

    Args:
        files: the files in the order of the prompts: the `hidden_states_path` in
            `output.kv_transfer_params` of each output. Or their folder: the files are then sorted
            by name, which is not the order of the prompts.
        out: a directory, or its address.
        layers: the ids of layers in `eagle_aux_hidden_state_layer_ids`, in the same order. vLLM
            counts the blocks before the value: layer 3 is `blocks.2.resid_post`, layer 0 is
            `blocks.0.resid_pre`, and the number of blocks is the stream after the last block.
        per_file: the number of texts in a file of the store.

    Returns:
        The store. The files do not record their model, so the model is not checked. Values keep the
        dtype of the files.

    Raises:
        FileNotFoundError: if a file does not exist, or the folder contains no safetensors files.
        ValueError: if a file does not have the two tensors, with as many layers as `layers`, or if
            the directory contains another store.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> folder = tempfile.mkdtemp()
    >>> states = torch.arange(12.0).view(3, 2, 2)  # 3 tokens, 2 layers, d_model 2
    >>> save_file(
    ...     {"token_ids": torch.tensor([7, 8, 9]), "hidden_states": states},
    ...     f"{folder}/request.safetensors",
    ... )
    >>> store = from_vllm([f"{folder}/request.safetensors"], f"{folder}/store", layers=[1, 4])
    >>> store.names
    ['blocks.0.resid_post', 'blocks.3.resid_post']
    >>> store.rows(0)["blocks.3.resid_post"][1]  # the second token
    tensor([6., 7.])
    """
    names = [_point_of(layer) for layer in layers]
    if not names or len({*names}) < len(names):
        raise ValueError(f"layers must be different ids of layers; got {[*layers]}")
    paths = _paths(files)
    contexts = (_context(path, names) for path in paths)
    axes = dict.fromkeys(names, ("d_model",))
    return imported(contexts, out, axes, HarvestConfig(per_file=per_file))


def _point_of(layer: int) -> str:
    """Return the point of a layer: the stream after `layer` blocks."""
    if layer < 0:
        raise ValueError(f"layers must contain ids from 0 on; got {layer}")
    return f"blocks.{layer - 1}.resid_post" if layer else "blocks.0.resid_pre"


def _paths(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """Return the paths of files, or of all safetensors files in a folder."""
    if not isinstance(files, str | os.PathLike):
        return [Path(file) for file in files]
    folder = Path(files)
    storage.require_folder(folder)
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{folder} must contain files that end in .safetensors; got none")
    return paths


def _context(path: Path, names: Sequence[str]) -> TextValues:
    """Return the tokens and values of a request."""
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} must be a complete safetensors file: {error}") from None
    if tensors.keys() != {"token_ids", "hidden_states"}:
        raise ValueError(
            f"{path} must contain token_ids and hidden_states; got {', '.join(sorted(tensors))}"
        )
    tokens = tensors["token_ids"]
    states = tensors["hidden_states"]
    if states.ndim != 3 or states.shape[:2] != (len(tokens), len(names)):
        raise ValueError(
            f"hidden_states of {path} must have the shape [{len(tokens)} tokens, {len(names)} "
            f"layers, d_model]; got {[*states.shape]}"
        )
    return TextValues(tokens, dict(zip(names, states.unbind(1), strict=True)))
