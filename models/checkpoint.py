"""Checkpoints of this package's own: a directory with a config, weights and a vocabulary."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from models.config import TransformerConfig
from models.tokenizer import CharTokenizer
from models.transformer import Transformer

BUNDLED = Path(__file__).parent / "bundled"


def available() -> list[str]:
    """Names of the models that ship with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def directory_of(name: str | os.PathLike[str]) -> Path:
    """The directory of a bundled model's name, or of a path.

    Raises:
        FileNotFoundError: if there is neither such a model nor such a directory.
    """
    for directory in (BUNDLED / name, Path(name)):
        if (directory / "config.json").is_file():
            return directory
    raise FileNotFoundError(
        f"no model is named {str(name)!r}, and no directory of that name holds a config.json; "
        f"available: {', '.join(available())}"
    )


def load(name: str | os.PathLike[str]) -> Transformer:
    """A model in eval mode, from its bundled name or the path of a directory `save` wrote.

    Raises:
        FileNotFoundError: if there is no such model; it lists what is available.
        ValueError: if a file there is damaged, or its weights are not the config's.
    """
    directory = directory_of(name)
    described = _read(directory / "config.json")
    try:
        model = Transformer(TransformerConfig(**described))
    except TypeError as error:
        raise ValueError(f"{directory / 'config.json'} is not a config: {error}") from None
    path = directory / "model.safetensors"
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    expected = {key: value for key, value in model.state_dict().items() if key in _keys(model)}
    wrong = [
        f"{key}: {_shape(weights, key)} in the file, {_shape(expected, key)} in the config"
        for key in sorted(weights.keys() | expected.keys())
        if _shape(weights, key) != _shape(expected, key)
    ]
    if wrong:
        raise ValueError(f"{path} does not fit its config: {'; '.join(wrong)}")
    model.load_state_dict(weights, strict=False)
    return model.eval()


def save(directory: str | os.PathLike[str], model: Transformer, tokenizer: CharTokenizer) -> None:
    """Writes a directory that `load` and `load_tokenizer` read."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    save_file({key: state[key].contiguous() for key in _keys(model)}, path / "model.safetensors")
    _write(path / "config.json", dataclasses.asdict(model.config))
    _write(path / "vocabulary.json", list(tokenizer.characters))


def load_tokenizer(name: str | os.PathLike[str]) -> CharTokenizer:
    """The tokenizer of a model, by the model's name or path.

    Raises:
        FileNotFoundError: if there is no such model.
    """
    return CharTokenizer(_read(directory_of(name) / "vocabulary.json"))


def _keys(model: Transformer) -> list[str]:
    """The state's keys; of tied weights only the first."""
    return [name for name, _ in model.named_parameters()]


def _shape(weights: dict[str, torch.Tensor], key: str) -> list[int] | None:
    return list(weights[key].shape) if key in weights else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
