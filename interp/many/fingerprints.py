"""Fingerprints: hashes of the values of any arguments, the same in every process.

1. A value is pickled, without references to earlier objects, so that equal values have equal bytes.
2. Tensors are hashed by their numbers, and dictionaries and sets in a sorted order. Modules are
   hashed by their config, their weights and buffers, the parts that are spliced in, and those
   attributes that are values: numbers, texts, tensors, functions without captured values, and
   containers and dataclasses of these.
   Private attributes are hashed if they are numbers or texts.
3. A function of `hooks`, `models` and `interp` is hashed by its name. Other functions are hashed by
   their code, their defaults and the values that they have captured.
4. A function of the user is also hashed by the global values that it reads, and a class of the user
   by its methods. This includes attributes of the user's modules, but no code of packages.
"""

import dis
import functools
import hashlib
import inspect
import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from operator import itemgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hooks import __version__
from hooks.base import config_hash, shown, storage, weights_hash
from hooks.shared import parts_of

_OURS = ("hooks", "models", "interp")
_NOT_CODE = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__")
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
    """Return whether a function, a class or a module is the user's own code.

    Code of Python, of this package and of installed packages is not.
    """
    while isinstance(value, functools.partial):
        value = value.func
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    name = str(name)
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
        if isinstance(value, type) and is_of_user(value):
            return self._class(value)
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
        values = captured, defaults, self._globals(function)
        return "function", *name, _code(function.__code__), *values

    def _class(self, of_user: type) -> Any:
        """Return the name of a class of the user, its bases, and its methods and other members."""
        name = of_user.__module__, of_user.__qualname__
        if id(of_user) in self._begun:
            return "class", *name
        self._begun.add(id(of_user))
        members = []
        for key, value in sorted(vars(of_user).items()):
            # The functions of a static method, a class method and a property.
            inner = getattr(value, "__func__", getattr(value, "fget", value))
            if key not in _NOT_CODE:
                members.append((key, self._global(inner)))
        return "class", *name, [self._global(base) for base in of_user.__bases__], members

    def _globals(self, function: FunctionType) -> list[Any]:
        """Return hashes of the global values that a function of the user reads, by name."""
        if not is_of_user(function):
            return []
        codes = [function.__code__]
        read = dict[str, Any]()
        for code in codes:
            codes += [part for part in code.co_consts if isinstance(part, CodeType)]
            steps = dis.get_instructions(code)
            names = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
            read |= {name: function.__globals__[name] for name in names & {*function.__globals__}}
        attributes = {name for code in codes for name in code.co_names}
        values = sorted(read.items(), key=itemgetter(0))
        modules = set[ModuleType]()
        for name, value in values:
            if isinstance(value, ModuleType) and is_of_user(value) and value not in modules:
                modules.add(value)
                inside = vars(value)
                values += [(f"{name}.{key}", inside[key]) for key in sorted(attributes & {*inside})]
        return [(name, self._global(value)) for name, value in values]

    def _global(self, value: Any) -> str:
        """Return a hash of a global value.

        Functions and classes of packages are hashed by their names. Values that cannot be pickled,
        such as modules and locks, are hashed by their class.
        """
        if isinstance(value, FunctionType | type) and not is_of_user(value):
            return f"{value.__module__}.{value.__qualname__}"
        # Pickling runs code of any class, which may raise any error.
        try:
            # A function with a cache contains the function without it.
            return self._hashed(inspect.unwrap(value) if callable(value) else value)
        except Exception:
            return type(value).__qualname__


def _tensor(value: Tensor) -> tuple[Any, ...]:
    """Return the dtype and the shape of a tensor, and a hash of its numbers."""
    content = hashlib.sha256(storage.bytes_of(value)).hexdigest()
    return "tensor", str(value.dtype), tuple(value.shape), content


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
        kind = type(part) if is_of_user(type(part)) else type(part).__qualname__
        attributes.append((name, kind, sorted(described.items())))
    # Parts that are spliced in, such as dictionaries, are not modules inside the model.
    parts = sorted((name, _module(part)) for name, part in parts_of(module).items())
    return "module", config_hash(module), weights_hash(module, whole=True), attributes, parts


def _attribute(value: Any) -> Any:
    """Return an attribute of a module in a form that can be pickled.

    Objects such as tokenizers and locks are represented by their class. A function is represented
    by its code. Variables that a function takes from outside are left out, because their values may
    be such objects.
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
