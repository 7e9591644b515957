"""Read and check configs and weights of dictionaries, for the readers of all formats.

The functions read configs and files of tensors, and check the contents of these files.

A reader takes a folder, or a file if the format is a single file, and returns our dictionaries. Its
keyword arguments are settings that the files may lack and that callers of `load_sae`,
`load_transcoders` and `load_crosscoder` can add. Each field of a config is used by a reader, is
known to change nothing, or raises an error.
"""

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
        ValueError: if the file contains no JSON object, or a number is not finite. The error names
            the file and the place.
    """
    with storage.one_error(path):
        config = strict_json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{path} must contain a JSON object; got {_shown(config)}")
    return config


def yaml_of(folder: Path, name: str = "config.yaml") -> dict[str, Any]:
    """Return the fields of a YAML file in a folder, or an empty dictionary if there is no such
    file.

    Args:
        folder: the folder.
        name: the name of the file. Default: `config.yaml`.

    Raises:
        ValueError: if the file is no YAML file with named fields. The error names the file.
    """
    path = folder / name
    if not path.is_file():
        return {}
    yaml = library("yaml", "pyyaml")
    with storage.one_error(path):
        config = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if not isinstance(config, dict):
        raise ValueError(f"{path} must contain named fields; got {_shown(config)}")
    return config


def tensors_of(path: Path) -> Weights:
    """Return the tensors in a safetensors file or in a NumPy archive.

    Raises:
        ValueError: if the file is damaged or has another format. The error names the file.
    """
    with storage.one_error(path):
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # Open the file here, because NumPy leaves a damaged file open.
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file}


def pickled(path: Path) -> dict[str, Any]:
    """Return the tensors and plain values, by name, that `torch.save` wrote to a file.

    Raises:
        ValueError: if the file is damaged or contains anything else. The error names the file.
    """
    content = storage.read_saved(path)
    if not isinstance(content, dict):
        kind = "None" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path} must contain tensors by name; got {kind}")
    return content


def known_fields(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the fields of a config that are not null, after a check of their names and types.

    Args:
        config: the config.
        what: the kind of config, a key of `fields.json`. This file lists the fields of the
            libraries' own classes over all versions.

    Raises:
        ValueError: if a field is unknown: no reader uses it, and the table does not list it as a
            field without effect. Or if a field has the wrong type.
    """
    fields = json_of(Path(__file__).with_name("fields.json"))[what]
    known = {*fields["honoured"], *fields["ignored"]}
    for name in sorted(map(str, config.keys() - known)):
        hint = str(UnknownNameError("", name, known))
        raise ValueError(
            f"fields of {what} must be known, because an unknown field might change the result; "
            f"got {name!r}{hint}"
        )
    require_types(config, what)
    return {name: value for name, value in config.items() if value is not None}


def require_types(config: Mapping[str, Any], what: str) -> None:
    """Check that each field that a reader uses has the type in `fields.json`.

    Args:
        config: the config, or a part of it. All other fields may have any type.
        what: the kind of config, a key of `fields.json`, such as `cfg.json of SAELens`.

    Raises:
        ValueError: if a field does not have the type of the table.
    """
    kinds = json_of(Path(__file__).with_name("fields.json"))[what]["honoured"]
    for name, value in config.items():
        declared = kinds.get(name, "any?")
        types = declared.removesuffix("?").split(" or ")
        may_be_null = declared.endswith("?")
        fits = may_be_null if value is None else any(_FITS[kind](value) for kind in types)
        if not fits:
            words = " or ".join(_IN_WORDS[kind] for kind in types)
            null = " or null" if may_be_null else ""
            raise ValueError(f"{name} in {what} must be {words}{null}; got {_shown(value)}")


def _is_whole(value: Any, least: int) -> bool:
    """Return True if a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "any": lambda value: True,
    "text": lambda value: isinstance(value, str) and bool(value),
    "bool": lambda value: isinstance(value, bool),
    "object": lambda value: isinstance(value, dict),
    "list": lambda value: (
        isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    ),
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
    """Return True if a value of JSON is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    """Return a value of JSON as a short text."""
    return "null" if value is None else f"{value!r:.60}"


def require_weights(
    weights: Mapping[str, Any],
    names: set[str],
    what: str,
    across_layers: bool = False,
    axes_of: Mapping[str, int] | None = None,
) -> None:
    """Check that weights have exactly the expected names, and are floating-point tensors with the
    right axes.

    Args:
        weights: the tensors of a file.
        names: the expected names.
        what: the file, or the part of the file, for the error.
        across_layers: whether decoders have an axis of layers. Default: False.
        axes_of: the number of axes of some tensors, by name. Default: as in a dictionary of one
            layer.

    Raises:
        ValueError: if a name is missing or unknown, or a tensor has another type or other axes.
    """
    missing = sorted(names - weights.keys())
    unknown = sorted(map(str, weights.keys() - names))
    if missing or unknown:
        lacks = f"; {', '.join(missing)} is missing" if missing else ""
        more = f"; {', '.join(unknown)} is unknown" if unknown else ""
        raise ValueError(f"the tensors of {what} must be {', '.join(sorted(names))}{lacks}{more}")
    for name in sorted(names - _COUNTS):
        weight = weights[name]
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            shown = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"{name} of {what} must be a floating-point tensor; got {shown}")
        n_axes = _AXES.get(name.lower().rpartition(".")[2])
        if name.lower() == "w_dec":
            n_axes = 3 if across_layers else 2
        n_axes = (axes_of or {}).get(name, n_axes)
        if n_axes is not None and weight.ndim != n_axes:
            raise ValueError(f"{name} of {what} must have {n_axes} axes; got {[*weight.shape]}")


# Tensors of whole numbers.
_COUNTS = {"k", "group_sizes"}
_AXES = {"w_enc": 2, "w_skip": 2, "weight": 2, "b_enc": 1, "b_dec": 1, "bias": 1}


def whole_of(name: str, value: Any) -> int:
    """Return a whole number from a config, or from a tensor with one element.

    Args:
        name: the name of the number, for errors.
        value: the number, or the tensor.

    Raises:
        ValueError: if the value is no whole number, or is smaller than 1.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    try:
        require_integer(name, value)
    except TypeError as error:
        raise ValueError(*error.args) from None
    return int(value)


def no_factor(norm_factor: float | None) -> None:
    """Check that no factor is given for files that do not need it.

    Raises:
        ValueError: if a factor is given.
    """
    if norm_factor is not None:
        raise ValueError(
            "norm_factor must be None for these files, which contain all factors or normalize at "
            f"run time; got {norm_factor}"
        )


def full_precision(weights: Weights) -> Weights:
    """Return weights in at least float32.

    A factor can then be multiplied into the weights without rounding to half precision.
    """
    return {name: at_least_float32(weight) for name, weight in weights.items()}


BY_HAND = """To build a dictionary by hand, write three lines:
    weights = torch.load(path, weights_only=True)  # or safetensors.torch.load_file(path)
    W_enc, W_dec, b_enc, b_dec = ...  # [d_in feature], [feature d_out], [feature], [d_out]
    sae = Dictionary(W_enc, W_dec, b_enc, b_dec, torch.nn.ReLU())  # or TopK(k), JumpReLU(threshold)
See help(Dictionary)."""
