"""What readers of several forms share: configs, names of points, the check of tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooks import UnknownNameError
from hooks.shared import library, storage, strict_json

Weights = dict[str, Tensor]


def json_of(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: if it is no such file, or a number is not finite; the message names the file and
            the place.
    """
    with storage.one_error(path):
        config = strict_json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object; got a {type(config).__name__}")
    return config


def yaml_of(folder: Path) -> dict[str, Any]:
    """Return what `config.yaml` in a folder says; nothing if there is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    return dict(library("yaml", "pyyaml").safe_load(path.read_text(encoding="utf-8")) or {})


def require_known(config: Mapping[str, Any], what: str) -> None:
    """Raise a ValueError if a config has a field that a reader neither honours nor knows to change nothing.

    Args:
        config: the config.
        what: what it is, a key of `fields.json`, which has the fields of the libraries' own classes, over all versions.
    """
    fields = json_of(Path(__file__).with_name("fields.json"))[what]
    known = {*fields["honoured"], *fields["ignored"]}
    for name in sorted(config.keys() - known):
        hint = str(UnknownNameError("", name, known))
        raise ValueError(
            f"fields of {what} must be known here, or they might change what is computed; got {name!r}{hint}"
        )


def require(weights: Mapping[str, Tensor], names: set[str], what: str) -> None:
    """Raise a ValueError unless the tensors are exactly the named ones."""
    missing, unknown = sorted(names - weights.keys()), sorted(weights.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"the tensors of {what} must be {', '.join(sorted(names))}; got no {missing} and also {unknown}"
        )


def no_factor(norm_factor: float | None) -> None:
    """Raise a ValueError if a factor is given where the files say all."""
    if norm_factor is not None:
        raise ValueError(
            f"norm_factor must be None here: the files say all, or were normed at run time; got {norm_factor}"
        )


def full_precision(weights: Weights) -> Weights:
    """Return weights in float32, or in what they have if that is more. A factor goes into them without rounding."""
    return {n: w.to(torch.promote_types(w.dtype, torch.float32)) for n, w in weights.items()}


BY_HAND = """By hand, three lines build one:
    weights = torch.load(path, weights_only=True)  # or safetensors.torch.load_file(path)
    W_enc, W_dec, b_enc, b_dec = ...  # of these: [d_in feature], [feature d_out], [feature], [d_out]
    sae = Dictionary(W_enc, W_dec, b_enc, b_dec, torch.nn.ReLU())  # or TopK(k), JumpReLU(threshold); see help(Dictionary)"""
