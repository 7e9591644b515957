"""What readers of several forms share: configs with the types of their fields, files of tensors, and the check of both."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from hooks import UnknownNameError
from hooks.base import at_least_float32, library, require_integer, storage, strict_json

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
        raise ValueError(f"{path} must hold a JSON object; got {_shown(config)}")
    return config


def yaml_of(folder: Path) -> dict[str, Any]:
    """Return what `config.yaml` in a folder says; nothing if there is none.

    Raises:
        ValueError: if it is no file of YAML with named fields; the message names the file.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        return {}
    yaml = library("yaml", "pyyaml")
    with storage.one_error(path):
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold named fields; got {_shown(config)}")
    return config


def tensors_of(path: Path) -> Weights:
    """Return the tensors in a file of safetensors, or in an archive of NumPy.

    Raises:
        ValueError: if it is damaged or no such file; the message names the file.
    """
    with storage.one_error(path):
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # NumPy would leave a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file}


def pickled(path: Path) -> dict[str, Any]:
    """Return what `torch.save` wrote to a file: tensors and plain values by name.

    Raises:
        ValueError: if it is damaged, or has anything else; the message names the file.
    """
    held = storage.read_saved(path)
    if not isinstance(held, dict):
        kind = "None" if held is None else f"a {type(held).__name__}"
        raise ValueError(f"{path} must hold tensors by name; got {kind}")
    return held


def known_fields(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the fields of a config that are not null, each of which is of its type.

    Args:
        config: the config.
        what: what it is, a key of `fields.json`, which has the fields of the libraries' own classes, over all versions.

    Raises:
        ValueError: if a field is neither honoured by a reader nor known to change nothing, or has another type.
    """
    fields = json_of(Path(__file__).with_name("fields.json"))[what]
    known = {*fields["honoured"], *fields["ignored"]}
    for name in sorted(map(str, config.keys() - known)):
        hint = str(UnknownNameError("", name, known))
        raise ValueError(
            f"fields of {what} must be known here, or they might change what is computed; got {name!r}{hint}"
        )
    require_types(config, what)
    return {name: value for name, value in config.items() if value is not None}


def require_types(config: Mapping[str, Any], what: str) -> None:
    """Raise a ValueError if a field that a reader honours has another type than `fields.json` says.

    Args:
        config: the config, or a part of it. Other fields may be anything.
        what: as for `known_fields`.
    """
    kinds = json_of(Path(__file__).with_name("fields.json"))[what]["honoured"]
    for name, value in config.items():
        kind = kinds.get(name, "any?").removesuffix("?")
        may_be_null = kinds.get(name, "any?").endswith("?")
        fits = (
            may_be_null if value is None else any(_FITS[one](value) for one in kind.split(" or "))
        )
        if not fits:
            words = " or ".join(_IN_WORDS[one] for one in kind.split(" or "))
            null = " or null" if may_be_null else ""
            raise ValueError(f"{name} in {what} must be {words}{null}; got {_shown(value)}")


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": lambda value: isinstance(value, str) and bool(value),
    "bool": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "index": lambda value: _is_whole(value, 0),
    "whole": lambda value: _is_whole(value, 1),
    "number": lambda value: is_number(value),
}
_IN_WORDS = {
    "text": "a text",
    "bool": "true or false",
    "object": "an object",
    "list": "a list of texts",
    "index": "a whole number of at least 0",
    "whole": "a whole number of at least 1",
    "number": "a number",
}


def is_number(value: Any) -> bool:
    """Return whether a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.60}"


def require(
    weights: Mapping[str, Any], names: set[str], what: str, across_layers: bool = False
) -> None:
    """Raise a ValueError unless the weights are exactly the named ones, and tensors of floating point with the right axes.

    Args:
        weights: the tensors of a file.
        names: the names of the tensors that the form has.
        what: the file, or the part of it.
        across_layers: whether decoders have an axis of layers.
    """
    missing, unknown = sorted(names - weights.keys()), sorted(map(str, weights.keys() - names))
    if missing or unknown:
        lacks = f"; {', '.join(missing)} is missing" if missing else ""
        more = f"; {', '.join(unknown)} is not known" if unknown else ""
        raise ValueError(f"the tensors of {what} must be {', '.join(sorted(names))}{lacks}{more}")
    for name in sorted(names - _COUNTS):
        weight = weights[name]
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            shown = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"{name} of {what} must be a tensor of floating point; got {shown}")
        n_axes = _AXES.get(name.lower().rpartition(".")[2])
        if name.lower() == "w_dec":
            n_axes = 3 if across_layers else 2
        if n_axes is not None and weight.ndim != n_axes:
            raise ValueError(f"{name} of {what} must have {n_axes} axes; got {[*weight.shape]}")


_COUNTS = {"k", "group_sizes"}  # whole numbers that lie among the tensors
_AXES = {"w_enc": 2, "w_skip": 2, "weight": 2, "b_enc": 1, "b_dec": 1, "bias": 1}


def whole_of(name: str, value: Any) -> int:
    """Return a whole number that stands in a config, or in a tensor of one number.

    Raises:
        ValueError: if it is none, or smaller than 1.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    require_integer(name, value)
    return int(value)


def no_factor(norm_factor: float | None) -> None:
    """Raise a ValueError if a factor is given where the files say all."""
    if norm_factor is not None:
        raise ValueError(
            f"norm_factor must be None here: the files say all, or were normed at run time; got {norm_factor}"
        )


def full_precision(weights: Weights) -> Weights:
    """Return weights in float32, or in what they have if that is more. A factor goes into them without rounding."""
    return {name: at_least_float32(weight) for name, weight in weights.items()}


BY_HAND = """By hand, three lines build one:
    weights = torch.load(path, weights_only=True)  # or safetensors.torch.load_file(path)
    W_enc, W_dec, b_enc, b_dec = ...  # of these: [d_in feature], [feature d_out], [feature], [d_out]
    sae = Dictionary(W_enc, W_dec, b_enc, b_dec, torch.nn.ReLU())  # or TopK(k), JumpReLU(threshold); see help(Dictionary)"""
