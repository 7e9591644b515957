"""Fingerprints: hashes of the values of any arguments, the same in every process.

1. A value is pickled, without references to earlier objects, so that equal values have equal bytes.
2. Tensors are hashed by their numbers, and dictionaries and sets in a sorted order. Modules are
   hashed by their config, their weights and buffers, the parts that are spliced in, and those
   attributes that are values: numbers, texts, tensors, functions without captured values, and
   containers and dataclasses of these.
   Private attributes are hashed if they are numbers or texts.
3. A function of `hooks`, `models` and `interp` is hashed by its name. Other functions are hashed by
   their code, their defaults and the values that they have captured. Global variables that a
   function reads are not hashed.
"""

import functools
import hashlib
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hooks import __version__
from hooks.base import config_hash, shown, weights_hash
from hooks.shared import parts_of

_OURS = ("hooks", "models", "interp")
_HASHED_BY_REPR = (bool, int, float, str, type(None))


def fingerprint(what: str, value: Any) -> str:
    """Return a hash of a value, 32 hexadecimal digits.

    Args:
        what: the name of the value, for the error.
        value: the value.

    Raises:
        TypeError: if the value cannot be pickled, such as an open file.

    >>> fingerprint("it", {"a": [1, 2], "b": 3}) == fingerprint("it", {"b": 3, "a": [1, 2]})
    True
    """
    file = io.BytesIO()
    try:
        _Hasher(file).dump((__version__, value))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{what} must be a value that can be pickled, because finished parts are found by its "
            f"hash; got {shown(value)} ({error})"
        ) from None
    return hashlib.sha256(file.getvalue()).hexdigest()[:32]


def is_of_user(value: Any) -> bool:
    """Return whether a function or a class is from the user's own code.

    Other functions are from Python, from this package or from an installed package.
    """
    while isinstance(value, functools.partial):
        value = value.func
    name = str(getattr(value, "__module__", ""))
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    is_installed = {"site-packages", "dist-packages"} & {*file.parts}
    return not is_installed and name.partition(".")[0] not in (*_OURS, *sys.stdlib_module_names)


class _Hasher(pickle.Pickler):
    """A pickler that writes hashes in place of tensors, modules, functions, mappings and sets."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        # No references to earlier objects: two equal lists are written in the same way, whether
        # they are one object or two.
        self.fast = True
        # A function can contain itself. These are the functions that are being hashed.
        self._begun: set[int] = set()

    def persistent_id(self, value: Any) -> Any:
        """Return what is written in place of a value; None to pickle the value itself."""
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return "array", str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, nn.Module):
            return _module(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, dict):
            pairs = [(self._hashed(key), self._hashed(part)) for key, part in value.items()]
            return "dict", type(value).__qualname__, sorted(pairs)
        if isinstance(value, set | frozenset):
            return "set", sorted(map(self._hashed, value))
        return None

    def _hashed(self, value: Any) -> str:
        """Return a hash of a part of a value."""
        file = io.BytesIO()
        hasher = _Hasher(file)
        hasher._begun = self._begun
        hasher.dump(value)
        return hashlib.sha256(file.getvalue()).hexdigest()

    def _function(self, function: FunctionType) -> Any:
        """Return the name of a function of this package, or the content of another function."""
        name = function.__module__, function.__qualname__
        if function.__module__.partition(".")[0] in _OURS or id(function) in self._begun:
            return "function", *name
        self._begun.add(id(function))
        captured = [cell.cell_contents for cell in function.__closure__ or ()]
        defaults = function.__defaults__, function.__kwdefaults__
        return "function", *name, _code(function.__code__), captured, defaults


def _tensor(value: Tensor) -> tuple[Any, ...]:
    """Return the dtype and the shape of a tensor, and a hash of its numbers."""
    numbers = value.detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    content = numbers.view(torch.uint8).numpy().tobytes()
    return "tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest()


def _module(module: nn.Module) -> tuple[Any, ...]:
    """Return hashes of the config and of all weights of a module, with its other values."""
    persistent = {*module.state_dict()}
    attributes = []
    for name, part in module.named_modules():
        # Private attributes other than numbers and texts are often caches, which change.
        values = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, _HASHED_BY_REPR) or not key.startswith("_")
        }
        for key, buffer in part.named_buffers(recurse=False):
            if f"{name}.{key}".lstrip(".") not in persistent:
                values[key] = buffer
        described = {key: _attribute(value) for key, value in values.items()}
        attributes.append((name, type(part).__qualname__, sorted(described.items())))
    # Parts that are spliced in, such as dictionaries, are not modules inside the model.
    parts = sorted((name, _module(part)) for name, part in parts_of(module).items())
    return "module", config_hash(module), weights_hash(module, whole=True), attributes, parts


def _attribute(value: Any) -> Any:
    """Return an attribute of a module in a form that can be pickled.

    Objects such as tokenizers and locks are represented by their class. Functions are represented
    by their code alone, because they may have captured such objects.
    """
    if isinstance(value, _HASHED_BY_REPR):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape) if value.is_meta else _tensor(value)
    if isinstance(value, np.ndarray | torch.dtype):
        return value
    if isinstance(value, FunctionType):
        return value.__module__, value.__qualname__, _code(value.__code__)
    if isinstance(value, BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, Mapping):
        return tuple((_attribute(key), _attribute(part)) for key, part in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_attribute, value))
    if isinstance(value, set | frozenset):
        return {*map(_attribute, value)}
    if is_dataclass(value) and not isinstance(value, type):
        content = tuple(_attribute(getattr(value, field.name)) for field in fields(value))
        return type(value).__qualname__, content
    return type(value).__qualname__


def _code(code: CodeType) -> tuple[Any, ...]:
    """Return the instructions of a function, with its names and constants."""
    constants = [_code(part) if isinstance(part, CodeType) else part for part in code.co_consts]
    return code.co_code, code.co_names, constants
