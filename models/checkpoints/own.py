"""This package's own format: a directory with a config, weights and a vocabulary."""

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from models.checkpoints.assemble import Source, assemble, check_layers
from models.checkpoints.readers import WHOLE, reader_of
from models.config import RotaryScaling, TransformerConfig
from models.tokenizer import CharTokenizer
from models.transformer import Transformer

BUNDLED = Path(__file__).parent.parent / "bundled"
# Fields that no family of Hugging Face's has.
_OWN = ("n_layers", "n_heads", "d_model")
CONFIG, VOCABULARY = "config.json", "vocabulary.json"


def bundled() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{CONFIG}"))


def is_own(described: Mapping[str, Any]) -> bool:
    """Whether a config.json has this package's fields, not those of Hugging Face."""
    return "model_type" not in described and not described.keys().isdisjoint(_OWN)


def load_own(
    directory: Path,
    described: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """The model in a directory that `save` wrote; `described` is its config.json.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if a file there is damaged, or its weights are not the config's.
    """
    config = _config(described, directory / CONFIG)
    reader, path = reader_of(directory)
    check_layers(config, reader, str(path))
    table = {key: Source((key,)) for key in set(reader.keys())}
    return assemble(config, table, reader, str(path), dtype=dtype, device=device)


def save(
    directory: str | os.PathLike[str], model: Transformer, tokenizer: CharTokenizer | None = None
) -> None:
    """Writes a directory that `load` and, with a tokenizer, `load_tokenizer` read.

    Each file is whole or not there: what is in the directory is replaced when all is written. Other
    files of the directory stay as they are.

    Raises:
        TypeError: if the tokenizer is not one of characters. Others have files of their own, which
            `load_tokenizer` reads if they are put into the directory.
    """
    if not isinstance(tokenizer, CharTokenizer | None):
        raise TypeError(
            f"save writes a CharTokenizer, not a {type(tokenizer).__name__}: put its files into the "
            "directory instead"
        )
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # Beside the old files, as a move between file systems is a copy.
    staged = Path(tempfile.mkdtemp(prefix=".saving-", dir=path))
    try:
        # Of tied weights only the first name.
        weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
        _write(staged / CONFIG, dataclasses.asdict(model.config))
        try:
            save_file(weights, staged / WHOLE)
        except SafetensorError as error:
            raise OSError(f"{path / WHOLE} cannot be written: {error}") from None
        # safetensors makes it readable by its owner alone.
        (staged / WHOLE).chmod((staged / CONFIG).stat().st_mode)
        if tokenizer is not None:
            _write(staged / VOCABULARY, list(tokenizer.characters))
        for name in (WHOLE, CONFIG, VOCABULARY):
            if (staged / name).exists():
                (staged / name).replace(path / name)
    finally:
        shutil.rmtree(staged)


def _config(described: Mapping[str, Any], path: Path) -> TransformerConfig:
    fields = dict(described)
    try:
        if isinstance(scaling := fields.get("rotary_scaling"), dict):
            factors = tuple(scaling.get("factors", ()))
            fields["rotary_scaling"] = RotaryScaling(**{**scaling, "factors": factors})
        if isinstance(layers := fields.get("window_layers"), list):
            fields["window_layers"] = tuple(layers)
        return TransformerConfig(**fields)
    except TypeError as error:
        raise ValueError(f"{path} is not a config: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
