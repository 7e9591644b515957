"""This package's own format: a directory with a config, weights and a vocabulary."""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hooks.base import require_kind, shown, storage, strict_json
from models.checkpoints.assemble import assemble
from models.checkpoints.readers import WHOLE, reader_of
from models.config import TransformerConfig
from models.rotary_scaling import RotaryBase, RotaryScaling
from models.text.tokenizer import CharTokenizer
from models.transformer import Transformer

BUNDLED = Path(__file__).parent.parent / "bundled_files"
CONFIG, VOCABULARY = "config.json", "vocabulary.json"


def list_models() -> list[str]:
    """Return the names of the models that ship with this package.

    Returns:
        The names, in alphabetical order. `load` accepts them.

    >>> list_models()
    ['pydoc-4l']
    """
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{CONFIG}"))


def load_own(
    directory: Path,
    described: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Load the model in a directory that `save` wrote.

    Args:
        directory: the directory.
        described: the content of its config.json.
        dtype: the dtype of all parameters. Default: the dtype of the file.
        device: the device of the parameters. Default: the CPU.

    Raises:
        FileNotFoundError: if the directory has no weights.
        ValueError: if a file is damaged, or the weights do not match the config.
    """
    with storage.one_error(directory / CONFIG):
        config = _own_config(described)
    reader, path = reader_of(directory)
    return assemble(config, {}, reader=reader, where=str(path), dtype=dtype, device=device)


def save(
    directory: str | os.PathLike[str], model: Transformer, tokenizer: CharTokenizer | None = None
) -> None:
    """Write a directory that `load` and, with a tokenizer, `load_tokenizer` can read.

    The file of weights contains a checksum of each tensor, and `load` compares them. Existing files
    are replaced only after all new files are complete. Files with other names in the directory do
    not change.

    Args:
        directory: the directory. It is created if it does not exist.
        model: the model to save.
        tokenizer: a `CharTokenizer` to save with the model. For a tokenizer of another class, copy
            its own files into the directory. Default: no tokenizer.

    Raises:
        TypeError: if the tokenizer is not a `CharTokenizer`.
        ValueError: if the name looks like a file, such as `model.safetensors`, and is not an
            existing directory.
        OSError: if the directory cannot be written.

    >>> import tempfile
    >>> from models import Transformer, TransformerConfig, load
    >>> config = TransformerConfig(vocab_size=5, n_ctx=7, n_layers=2, n_heads=2, d_model=6)
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save(directory, Transformer(config))
    ...     load(directory).config == config
    True
    """
    require_kind(
        "directory", directory, (str, os.PathLike), words="a path", call="save(directory, model)"
    )
    require_kind("model", model, Transformer, words="a Transformer")
    if not isinstance(tokenizer, CharTokenizer | None):
        raise TypeError(f"tokenizer must be a CharTokenizer or None; got {shown(tokenizer)}")
    storage.require_folder(directory)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # A tied weight is written once, under its first name.
    weights = {
        name: parameter.detach().contiguous() for name, parameter in model.named_parameters()
    }
    checksums = {storage.CHECKSUMS: storage.checksums(weights)}
    described: dict[str, Any] = {CONFIG: dataclasses.asdict(model.config)}
    if tokenizer is not None:
        described[VOCABULARY] = list(tokenizer.characters)
    # The new files replace the old files when the stack ends, so all new files are complete by
    # then.
    with ExitStack() as stack:
        staged = {
            name: stack.enter_context(storage.replacing(path / name))
            for name in (WHOLE, *described)
        }
        for name, value in described.items():
            _write(staged[name], value)
        try:
            save_file(weights, staged[WHOLE], metadata=checksums)
        except SafetensorError as error:
            raise OSError(f"{path / WHOLE} cannot be written: {error}") from None
        # safetensors writes a file that only its owner can read, so give it the rights of the other
        # files.
        staged[WHOLE].chmod(staged[CONFIG].stat().st_mode)


def _own_config(described: Mapping[str, Any]) -> TransformerConfig:
    """Return the config that a config.json of this package describes.

    Raises:
        ValueError: if a field is unknown.
    """
    fields = _with_tuples(described)
    if unknown := sorted(fields.keys() - TransformerConfig.__dataclass_fields__.keys()):
        got = f"{', '.join(unknown)}; to load the model without them: ignore={unknown}"
        raise ValueError(f"every field must be a field of TransformerConfig; got {got}")
    fields["rotary_scaling"] = _scaling(fields.get("rotary_scaling"))
    if (base := fields.get("window_rotary")) is not None:
        fields["window_rotary"] = RotaryBase(**{**base, "scaling": _scaling(base.get("scaling"))})
    return TransformerConfig(**fields)


def _scaling(described: Mapping[str, Any] | None) -> RotaryScaling | None:
    """Return the rotary scaling that a config.json describes; None if it describes none."""
    return None if described is None else RotaryScaling(**_with_tuples(described))


def _with_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields in which each list of JSON is a tuple, as in a config."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }


def _write(path: Path, value: Any) -> None:
    """Write a value as JSON."""
    text = strict_json.dumps(value, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
