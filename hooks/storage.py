"""Caches on disk: safetensors with names, axes and a hash of the model's configuration."""

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hooks._torch import has_storage, memory_of
from hooks.errors import CacheError

_FORMAT = "hookscope-cache-3"
# Before the name of a gradient or an input; no module's name starts with a dot.
GRAD, INPUT = ".grad.", ".input."


def config_hash(model: nn.Module) -> str:
    """A hash of the model's `config`, or of its parameters' names and shapes if it has none."""
    config: Any = getattr(model, "config", None)
    described: Any
    if hasattr(config, "to_dict"):
        volatile = {"architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
        described = {
            key: value
            for key, value in config.to_dict().items()
            if key not in volatile and not key.startswith("_")
        }
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        described = dataclasses.asdict(config)
    else:
        described = {name: list(value.shape) for name, value in model.named_parameters()}
    text = json.dumps([type(model).__name__, described], sort_keys=True, default=_described)
    return hashlib.sha256(text.encode()).hexdigest()


def _described(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    return getattr(value, "__qualname__", None) or str(value)


def weights_hash(model: nn.Module) -> str:
    """A hash of the name, the shape and at most 16 numbers of each parameter."""
    hashed = hashlib.sha256()
    for name, weight in model.named_parameters():
        numbers: Any = None
        if has_storage(weight) and not weight.is_meta:
            flat = weight.detach().flatten()
            numbers = flat[:: max(1, -(-len(flat) // 16))].tolist()
        hashed.update(repr((name, tuple(weight.shape), numbers)).encode())
    return hashed.hexdigest()


def nbytes(tensors: Collection[Tensor]) -> int:
    """The memory of `tensors`, in bytes. Shared storage counts once; sparse tensors count as dense ones."""
    shared = {memory_of(t): t.untyped_storage().nbytes() for t in tensors if has_storage(t)}
    others = [t.numel() * t.element_size() for t in tensors if not has_storage(t)]
    return sum(shared.values()) + sum(others)


def save(
    path: Path, values: Mapping[str, Tensor], description: dict[str, Any], kind: str = _FORMAT
) -> None:
    """Writes values and their description to `path`, completely or not at all."""
    alone: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in values.items():
        # safetensors refuses tensors that share memory, and writes a slice's whole storage.
        whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
        if not whole or memory_of(value) in seen:
            value = value.clone(memory_format=torch.contiguous_format)
        alone[name] = value
        seen.add(memory_of(value))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the directory of {str(path)!r} must exist")
    metadata = {"format": kind, "cache": json.dumps(description)}
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        save_file(alone, partial, metadata=metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The values and the description that `save` wrote to `path` with this `kind`.

    Raises:
        Exception: of some kind, if the file is another one.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    if metadata.get("format") != kind:
        raise ValueError(f"the format must be {kind!r}; got {metadata.get('format')!r}")
    return values, json.loads(metadata["cache"])


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads the values and the description that `save` wrote to `path`.

    Raises:
        FileNotFoundError: if there is no such file.
        CacheError: if the file is truncated, or `save` did not write it.
    """
    try:
        values, found = read(path, _FORMAT)
        axes = {name: tuple(map(str, own)) for name, own in found["axes"].items()}
        described = {"axes": axes, "known": tuple(map(str, found["known"]))}
        described |= {key: str(found[key]) for key in ("config_hash", "weights_hash")}
        described["skipped"] = {name: str(reason) for name, reason in found["skipped"].items()}
        inputs = dict(found.pop("inputs"))
        if json.loads(json.dumps(described)) != found:
            raise TypeError("names, axes and reasons must be text")
        ordered = {name: values.pop(name) for name in axes}
        grads = {name: values.pop(GRAD + name) for name in axes if GRAD + name in values}
        held = [name for name in values if name.startswith(INPUT)]
        inputs |= {name.removeprefix(INPUT): values.pop(name) for name in held}
        if values:
            raise ValueError(f"all values must have axes; got none for {', '.join(values)}")
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CacheError(f"{path} must be a complete cache that `save` wrote: {error!r}") from None
    return ordered, described | {"grads": grads or None, "inputs": inputs}
